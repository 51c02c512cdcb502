"""A histogram of durations with a constant relative error over the whole range.

Each bucket is 1 % wider than the one before. The memory does not depend on the number of durations.
"""

import math

import numpy as np
from numpy.typing import NDArray

_LOWEST_S = 1e-7
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
_NUM_BUCKETS = 4096  # up to about 5e10 s


class DurationHistogram:
    """Counts durations; percentiles are midpoints of buckets, accurate to 0.5 %. In percentiles,
    durations up to 0.1 us count as 0.
    """

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._sum_s = 0.0
        self._max_s = 0.0

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, durations_s: NDArray[np.float64]) -> None:
        """Count durations [n] in seconds, none negative."""
        if not len(durations_s):
            return
        logs = np.log(np.maximum(durations_s, _LOWEST_S) / _LOWEST_S) / _LOG_GROWTH
        buckets = np.minimum(np.ceil(logs).astype(np.int64), _NUM_BUCKETS - 1)
        self._counts += np.bincount(buckets, minlength=_NUM_BUCKETS)
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
        num = len(self)
        if not num:
            return math.nan
        rank = max(1, math.ceil(percent / 100.0 * num))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_middle_s(bucket), self._max_s)

    def cumulative(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the cumulative distribution, two arrays float64 [n]: the midpoints of the buckets
        in use, seconds, and for each the share of all durations in it and in the buckets below.
        """
        used = np.flatnonzero(self._counts)
        shares = np.cumsum(self._counts)[used] / max(1, len(self))
        return np.array([min(_middle_s(int(bucket)), self._max_s) for bucket in used]), shares


def _middle_s(bucket: int) -> float:
    return _LOWEST_S * _GROWTH ** (bucket - 0.5) if bucket else 0.0
