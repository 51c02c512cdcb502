"""Buckets for counts of durations, with a constant relative error (Masson, Rim and Lee, "DDSketch",
VLDB 2019).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class DurationBuckets:
    """`num` buckets from `lowest_s` to `highest_s`, in seconds; each upper bound is `growth` times
    the bound below. Durations outside the range count as its bounds.

    The duration that is reported for a bucket is within (growth - 1) / 2 of each one in it.
    """

    def __init__(self, *, lowest_s: float, highest_s: float, growth: float) -> None:
        self._lowest_s, self._highest_s, self._growth = lowest_s, highest_s, growth
        self._log_growth = math.log(growth)
        self.num = math.ceil(math.log(highest_s / lowest_s) / self._log_growth) + 1

    def indexes(self, durations_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the bucket of each duration, int64 [n]."""
        clipped = np.clip(durations_s, self._lowest_s, self._highest_s)
        return np.ceil(np.log(clipped / self._lowest_s) / self._log_growth).astype(np.int64)

    def durations_s(self, indexes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the duration that is reported for each bucket, float64 [n], seconds. Its relative
        difference from both bounds of the bucket is equal.
        """
        uppers_s = self._lowest_s * np.exp(indexes * self._log_growth)
        reported_s: NDArray[np.float64] = 2 * uppers_s / (1 + self._growth)
        return np.maximum(reported_s, self._lowest_s)

    def percentiles_s(self, counts: NDArray[np.int64], percents: Sequence[float]) -> list[float]:
        """Return nearest-rank percentiles in seconds. `counts`: int64 [num], not all 0."""
        cumulative = np.cumsum(counts)
        num = int(cumulative[-1])
        ranks = [max(1, math.ceil(percent / 100.0 * num)) for percent in percents]
        reported_s = self.durations_s(np.searchsorted(cumulative, ranks))
        return [float(value_s) for value_s in reported_s]
