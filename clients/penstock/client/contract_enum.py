"""The base class of the client's enums. Values are protobuf enum numbers. In enums of responses,
UNKNOWN (-1, in `HealthStatus` 0) stands for a number that this client does not define."""

import enum


class ContractEnum(enum.IntEnum):
    """An IntEnum that is displayed as FinishReason.LENGTH instead of its number, by `str`, `repr`
    and in f-strings."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __repr__ = __str__

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)
