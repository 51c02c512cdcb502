"""Monotonic seconds become Unix nanoseconds. The one place where they do.

Records tell times of the machine's monotonic clock; traces of several machines meet in Unix time.
The distance between the clocks is measured again now and then, because Unix time is corrected; all
spans of one trace are moved by one distance, so that no correction tears them apart.
"""

import time
from collections.abc import Callable

_MAX_AGE_NS = 1_000_000_000
_NUM_READINGS = 3


class UnixClock:
    """Knows how far apart the two clocks are. For one thread."""

    def __init__(
        self,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns
        self._measured_ns: int | None = None
        self._offset_ns = 0

    def offset_ns(self) -> int:
        """Unix time less monotonic time, at most a second old."""
        now_ns = self._monotonic_ns()
        if self._measured_ns is None or now_ns - self._measured_ns > _MAX_AGE_NS:
            self._offset_ns = self._measure()
            self._measured_ns = now_ns
        return self._offset_ns

    def _measure(self) -> int:
        """Of a few readings the one that was interrupted least."""
        readings: list[tuple[int, int]] = []
        for _ in range(_NUM_READINGS):
            before_ns = self._monotonic_ns()
            unix_ns = self._unix_ns()
            after_ns = self._monotonic_ns()
            readings.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
        return min(readings)[1]


def to_unix_ns(at_s: float, offset_ns: int) -> int:
    """A moment of the monotonic clock, in nanoseconds since 1970."""
    return round(at_s * 1e9) + offset_ns
