"""Counts durations from a microsecond to an hour in an HdrHistogram, with three significant
digits.
"""

import math
from typing import Any

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

_MAX_S = 3600.0
_UNITS_PER_S = 1_000_000
_DIGITS = 3


class LatencyHistogram:
    """Counts durations. Percentiles are accurate to 0.1 %; count, mean and maximum are exact.

    In percentiles, durations over an hour count as an hour.
    """

    def __init__(self) -> None:
        self._counts: Any = HdrHistogram(1, int(_MAX_S * _UNITS_PER_S), _DIGITS)
        self._num = 0
        self._sum_s = 0.0
        self._max_s = 0.0

    def __len__(self) -> int:
        return self._num

    def record(self, duration_s: float) -> None:
        """Count one duration, in seconds. A negative duration, e.g. the lateness of a request sent
        a microsecond before it is due, counts as 0.
        """
        duration_s = max(duration_s, 0.0)
        self._counts.record_value(round(min(duration_s, _MAX_S) * _UNITS_PER_S))
        self._num += 1
        self._sum_s += duration_s
        self._max_s = max(self._max_s, duration_s)

    def merge(self, other: "LatencyHistogram") -> None:
        """Add the counts of another histogram."""
        # Access to private fields of the same class.
        self._counts.add(other._counts)  # noqa: SLF001
        self._num += other._num  # noqa: SLF001
        self._sum_s += other._sum_s  # noqa: SLF001
        self._max_s = max(self._max_s, other._max_s)  # noqa: SLF001

    @property
    def mean_s(self) -> float:
        """The exact mean, seconds; NaN if empty."""
        return self._sum_s / self._num if self._num else math.nan

    @property
    def max_s(self) -> float:
        """The exact maximum, seconds; NaN if empty."""
        return self._max_s if self._num else math.nan

    def percentile_s(self, percent: float) -> float:
        """Return the nearest-rank percentile in seconds, to the histogram's accuracy; NaN if
        empty.
        """
        if not self._num:
            return math.nan
        value_s: float = self._counts.get_value_at_percentile(percent) / _UNITS_PER_S
        return min(value_s, self._max_s)

    def percentiles_s(self) -> list[float]:
        """Return the percentiles 0, 1 .. 100 in seconds; empty if no duration was counted."""
        if not self._num:
            return []
        # In one pass: a pass over all counts takes milliseconds.
        found = self._counts.get_percentile_to_value_dict(range(101))
        return [min(found[percent] / _UNITS_PER_S, self._max_s) for percent in range(101)]

    def state(self) -> tuple[bytes, int, float, float]:
        """Return the content as the arguments of `from_state`, to be sent to another process."""
        return self._counts.encode(), self._num, self._sum_s, self._max_s

    @classmethod
    def from_state(cls, counts: bytes, num: int, sum_s: float, max_s: float) -> "LatencyHistogram":
        """Return the histogram with this `state`."""
        made = cls()
        made._counts = HdrHistogram.decode(counts)  # pyright: ignore[reportUnknownMemberType]  # it has no types
        made._num, made._sum_s, made._max_s = num, sum_s, max_s
        return made
