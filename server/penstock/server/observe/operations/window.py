"""Sliding windows: sums over ten seconds, and distributions of durations over a minute.

Owns rings of time slots of fixed size; older slots are dropped. Has no clock: every call has the
time as an argument, in seconds on the caller's clock.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.server.observe.operations.snapshot import Percentiles

MIN_DURATION_S, MAX_DURATION_S = 1e-5, 1e5
"""The range of durations; shorter and longer durations count as these."""
_GROWTH = 1.02
_LOG_GROWTH = math.log(_GROWTH)
_NUM_BUCKETS = math.ceil(math.log(MAX_DURATION_S / MIN_DURATION_S) / _LOG_GROWTH) + 1
_LEVELS = (0.5, 0.9, 0.99)


class _Slots:
    """The time interval of each slot of a ring: number n covers [n, n + 1) * slot_s."""

    def __init__(self, num_slots: int, slot_s: float) -> None:
        self.slot_s = slot_s
        self.num_slots = num_slots
        self._numbers = np.full(num_slots, -1, dtype=np.int64)

    def number_at(self, at_s: float) -> int:
        """The slot number of a time."""
        return math.floor(at_s / self.slot_s)

    def claim(self, number: int) -> tuple[int, bool]:
        """The index of slot `number`, and whether it is new there; -1 if it is too old."""
        index = number % self.num_slots
        held = int(self._numbers[index])
        if held > number:
            return -1, False
        self._numbers[index] = number
        return index, held != number

    def live(self, now_s: float) -> NDArray[np.bool_]:
        """Mask of the ring's entries within the last `num_slots` slots."""
        newest = self.number_at(now_s)
        return (self._numbers > newest - self.num_slots) & (self._numbers <= newest)


class DurationWindow:
    """Distribution of durations over the last `num_slots * slot_s` seconds.

    Counts in buckets whose bounds grow by 2 %, so that a percentile is within 1 % of the true one,
    whatever its size, in fixed memory (Masson, Rim and Lee, "DDSketch", VLDB 2019).
    """

    def __init__(self, *, num_slots: int = 60, slot_s: float = 1.0) -> None:
        self._slots = _Slots(num_slots, slot_s)
        self._counts = np.zeros((num_slots, _NUM_BUCKETS), dtype=np.int64)

    def add(self, at_s: float, durations_s: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add durations at time `at_s`, each counted `weights` times (default: once).

        NaN and weights of 0 are ignored.
        """
        values = np.atleast_1d(np.asarray(durations_s, dtype=np.float64))
        counts = np.ones(len(values)) if weights is None else np.atleast_1d(np.asarray(weights))
        is_known = ~np.isnan(values)
        if not is_known.any():
            return
        index, is_new = self._slots.claim(self._slots.number_at(at_s))
        if index < 0:
            return
        if is_new:
            self._counts[index] = 0
        clipped = np.clip(values[is_known], MIN_DURATION_S, MAX_DURATION_S)
        buckets = np.ceil(np.log(clipped / MIN_DURATION_S) / _LOG_GROWTH).astype(np.int64)
        np.add.at(self._counts[index], buckets, counts[is_known].astype(np.int64))

    def percentiles(self, now_s: float) -> Percentiles:
        """p50, p90 and p99 in seconds."""
        counts = self._counts[self._slots.live(now_s)].sum(axis=0)
        cumulative = np.cumsum(counts)
        num = int(cumulative[-1])
        if not num:
            return Percentiles()
        ranks = [max(1, math.ceil(level * num)) for level in _LEVELS]
        p50_s, p90_s, p99_s = (
            _bucket_s(int(index)) for index in np.searchsorted(cumulative, ranks)
        )
        return Percentiles(p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, num=num)


class SumWindow:
    """Sums of several quantities over the last `num_slots * slot_s` seconds."""

    def __init__(self, num_sums: int, *, num_slots: int = 40, slot_s: float = 0.25) -> None:
        self._slots = _Slots(num_slots, slot_s)
        self._sums = np.zeros((num_slots, num_sums))
        self._begun_s = math.inf

    def add(self, times_s: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Add `values` [n, num_sums] at `times_s` [n]."""
        if not len(times_s):
            return
        self._begun_s = min(self._begun_s, float(times_s[0]))
        numbers = np.floor(times_s / self._slots.slot_s).astype(np.int64)
        for number in np.unique(numbers):
            index, is_new = self._slots.claim(int(number))
            if index < 0:
                continue
            if is_new:
                self._sums[index] = 0.0
            self._sums[index] += values[numbers == number].sum(axis=0)

    def sums(self, now_s: float) -> NDArray[np.float64]:
        """The sums [num_sums]."""
        total: NDArray[np.float64] = self._sums[self._slots.live(now_s)].sum(axis=0)
        return total

    def covered_s(self, now_s: float) -> float:
        """The time that the sums cover: less than the whole window at the beginning."""
        slot_s = self._slots.slot_s
        oldest_s = (self._slots.number_at(now_s) - self._slots.num_slots + 1) * slot_s
        return max(now_s - max(oldest_s, self._begun_s), slot_s)


def _bucket_s(index: int) -> float:
    """The reported value of a bucket: the middle, with equal relative error to both bounds."""
    if not index:
        return MIN_DURATION_S
    upper_s = MIN_DURATION_S * math.exp(index * _LOG_GROWTH)
    return 2 * upper_s / (1 + _GROWTH)
