"""The base of the client's enums: values are the numbers of the contract, shown by name."""

import enum


class ContractEnum(enum.IntEnum):
    """An int that `str`, `repr` and f-strings show as FinishReason.LENGTH; `name` is LENGTH."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __repr__ = __str__

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)
