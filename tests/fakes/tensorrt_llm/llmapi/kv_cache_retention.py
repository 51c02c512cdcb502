"""Retention of parts of a request's cache: the binding's classes, after the C++ source."""

from __future__ import annotations

from datetime import timedelta


def _is_duration(value: object) -> bool:
    return value is None or isinstance(value, timedelta)


class _TokenRangeRetentionConfig:
    """Priority (0 to 100, higher stays longer) of the pages of tokens [start, end)."""

    def __init__(
        self,
        token_start: int,
        token_end: int | None,
        priority: int,
        duration_ms: timedelta | None = None,
    ) -> None:
        if not 0 <= priority <= 100:
            raise ValueError("Retention priority must be in [0, 100]")
        if not _is_duration(duration_ms):
            raise TypeError("duration_ms is a datetime.timedelta")
        self.token_start = token_start
        self.token_end = token_end
        self.priority = priority
        self.duration_ms = duration_ms


class KvCacheRetentionConfig:
    """Retention of a prompt's ranges and of the output."""

    TokenRangeRetentionConfig = _TokenRangeRetentionConfig

    def __init__(
        self,
        token_range_retention_configs: list[_TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
        transfer_mode: str = "DRAM",
        directory: str | None = None,
    ) -> None:
        if not 0 <= decode_retention_priority <= 100:
            raise ValueError("Retention priority must be in [0, 100]")
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms
        self.transfer_mode = transfer_mode
        self.directory = directory

    def priority_of(self, token: int) -> int:
        """Return the priority of a prompt position. Not in the real class."""
        for part in self.token_range_retention_configs:
            if part.token_start <= token and (part.token_end is None or token < part.token_end):
                return part.priority
        return self.decode_retention_priority
