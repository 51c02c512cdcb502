"""A histogram of durations with a constant relative error over the whole range.

The memory does not depend on the number of durations.
"""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.duration_buckets import DurationBuckets

_BUCKETS = DurationBuckets(lowest_s=1e-7, highest_s=1e10, growth=1.01)


class DurationHistogram:
    """Counts durations. Percentiles are accurate to 0.5 % or 0.1 us; count, mean and maximum are
    exact.
    """

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS.num, dtype=np.int64)
        self._sum_s = 0.0
        self._max_s = 0.0

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, durations_s: NDArray[np.float64]) -> None:
        """Count durations [n] in seconds, none negative."""
        if not len(durations_s):
            return
        self._counts += np.bincount(_BUCKETS.indexes(durations_s), minlength=_BUCKETS.num)
        self._sum_s += float(durations_s.sum())
        self._max_s = max(self._max_s, float(durations_s.max()))

    def merge(self, other: "DurationHistogram") -> None:
        """Add the counts of another histogram."""
        # Access to private fields of the same class.
        self._counts += other._counts  # noqa: SLF001
        self._sum_s += other._sum_s  # noqa: SLF001
        self._max_s = max(self._max_s, other._max_s)  # noqa: SLF001

    @property
    def mean_s(self) -> float:
        """The exact mean, seconds; NaN if empty."""
        num = len(self)
        return self._sum_s / num if num else math.nan

    @property
    def max_s(self) -> float:
        """The exact maximum, seconds; NaN if empty."""
        return self._max_s if len(self) else math.nan

    def percentile_s(self, percent: float) -> float:
        """Return the nearest-rank percentile in seconds, to the histogram's accuracy; NaN if
        empty.
        """
        if not len(self):
            return math.nan
        [value_s] = _BUCKETS.percentiles_s(self._counts, [percent])
        return min(value_s, self._max_s)

    def cumulative(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the cumulative distribution, two arrays float64 [n]: the durations reported for
        the buckets in use, seconds, and for each the share of all durations in it and in the
        buckets below.
        """
        used = np.flatnonzero(self._counts)
        shares = np.cumsum(self._counts)[used] / max(1, len(self))
        return np.minimum(_BUCKETS.durations_s(used), self._max_s), shares
