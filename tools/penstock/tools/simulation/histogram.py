"""A histogram of durations with a constant relative error over the whole range.

Owns the buckets: each is one per cent wider than the one below it (the idea of HdrHistogram), so
hundreds of millions of durations take a few kilobytes. Independent of what is measured.
"""

import math

import numpy as np
from numpy.typing import NDArray

_LOWEST_S = 1e-7
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
_NUM_BUCKETS = 4096  # up to about 5e10 s


class DurationHistogram:
    """Counts durations; results are within half a per cent. Durations under 0.1 us count as 0."""

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
        # An instance of the same class.
        self._counts += other._counts  # noqa: SLF001
        self._sum_s += other._sum_s  # noqa: SLF001
        self._max_s = max(self._max_s, other._max_s)  # noqa: SLF001

    @property
    def mean_s(self) -> float:
        """The exact mean; NaN if empty."""
        num = len(self)
        return self._sum_s / num if num else math.nan

    @property
    def max_s(self) -> float:
        """The exact maximum; NaN if empty."""
        return self._max_s if len(self) else math.nan

    def percentile_s(self, percent: float) -> float:
        """Return the smallest duration that at least `percent` % do not exceed; NaN if empty."""
        num = len(self)
        if not num:
            return math.nan
        rank = max(1, math.ceil(percent / 100.0 * num))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_middle_s(bucket), self._max_s)

    def cumulative(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return durations and the share of all durations up to each, for the buckets in use."""
        used = np.flatnonzero(self._counts)
        shares = np.cumsum(self._counts)[used] / max(1, len(self))
        return np.array([_middle_s(int(bucket)) for bucket in used]), shares


def _middle_s(bucket: int) -> float:
    return _LOWEST_S * _GROWTH ** (bucket - 0.5) if bucket else 0.0
