"""Computes the load, throughput and inter-token latency of the engine from its steps.

The steps are rows of the flight recorder. Throughput and the mean duration of a step are computed
over the last ten seconds, percentiles of latency over the last minute. Times are seconds on the
machine's monotonic clock, passed as arguments. Totals and windows continue when a new engine
replaces one that ended.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.scheduler.events import WaitReason
from penstock.server.observe.duration_buckets import DurationBuckets
from penstock.server.observe.flight.layout import NO_REASON
from penstock.server.observe.operations.snapshot import Percentiles

_PREFILL, _DECODE, _STEPS, _STEP_S = range(4)
_BUCKETS = DurationBuckets(lowest_s=1e-5, highest_s=1e5, growth=1.02)
_PERCENTS = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates over the last ten seconds. `mean_step_s` is None if there was no step."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_step_s: float | None


class EngineSteps:
    """Aggregates rows of `flight.layout.STEP`. The totals and the state after the last step are
    attributes.

    The numbers of steps, tokens and preemptions are totals over all engines. Steps that were
    overwritten before they were read are included only in the number of steps. `updated_s` is the
    time at which the result of the newest step was processed.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_preempted = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_used_blocks = 0
        self.num_cached_blocks = 0
        self.num_free_blocks = 0
        self.waits_for = ""
        self.updated_s = -np.inf
        self._sums = SumWindow(4)
        self._itl = DurationWindow()

    def add_steps(self, epoch: int, rows: NDArray[Any], num_missed: int) -> None:
        """Add steps of the engine of `epoch`, the oldest first. Steps of older engines are
        ignored."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self._reset_state()
            self.epoch = epoch
        self.num_steps += len(rows) + num_missed
        if not len(rows):
            return
        self.num_tokens += int(rows["num_tokens"].sum(dtype=np.int64))
        self.num_preempted += int(rows["num_preempted"].sum(dtype=np.int64))
        updated_s = rows["updated_s"]
        # With two steps in flight the later one waits for the earlier one, so no time is counted
        # twice.
        ended_s = np.concatenate(([self.updated_s], updated_s[:-1]))
        step_s = updated_s - np.maximum(rows["begun_s"], ended_s)
        self._take_last(rows[-1])
        self._sums.add(
            updated_s,
            np.column_stack(
                (
                    rows["num_prefill_tokens"],
                    rows["num_tokens"],
                    np.ones(len(rows)),
                    step_s,
                )
            ).astype(np.float64),
        )
        self._itl.add(float(updated_s[-1]), rows["itl_s"], rows["num_itl"])

    def engine_lost(self) -> None:
        """Record that the engine is down, so it runs no requests and has no blocks."""
        self._reset_state()

    def rates(self, now_s: float) -> Rates:
        """Return the rates over the last ten seconds."""
        sums, covered_s = self._sums.sums(now_s), self._sums.covered_s(now_s)
        num_steps = sums[_STEPS]
        return Rates(
            prefill_tokens_per_s=float(sums[_PREFILL] / covered_s),
            decode_tokens_per_s=float(sums[_DECODE] / covered_s),
            mean_step_s=float(sums[_STEP_S] / num_steps) if num_steps else None,
        )

    def itl(self, now_s: float) -> Percentiles:
        """Return the percentiles of the inter-token latency over the last minute, in seconds."""
        return self._itl.percentiles(now_s)

    def clear_live_requests(self) -> None:
        """Record that no request is live. The last step may be old and may still have had requests.

        Their blocks count as cached until the next step.
        """
        self.num_running = self.num_waiting = 0
        self.waits_for = ""
        self.num_cached_blocks += self.num_used_blocks
        self.num_used_blocks = 0

    def _take_last(self, row: Any) -> None:
        self.num_running = int(row["num_running"])
        self.num_waiting = int(row["num_waiting"])
        self.num_used_blocks = int(row["num_used_blocks"])
        self.num_cached_blocks = int(row["num_cached_blocks"])
        self.num_free_blocks = int(row["num_free_blocks"])
        self.waits_for = wait_reason_name(int(row["waits_for"])) if self.num_waiting else ""
        self.updated_s = float(row["updated_s"])

    def _reset_state(self) -> None:
        self.num_running = self.num_waiting = 0
        self.num_used_blocks = self.num_cached_blocks = self.num_free_blocks = 0
        self.waits_for = ""


def wait_reason_name(value: int) -> str:
    """Return the name of a WaitReason; empty for `NO_REASON` and unknown values."""
    if value == NO_REASON:
        return ""
    try:
        return WaitReason(value).name
    except ValueError:
        return ""


class _Slots:
    """The time slots of a ring buffer. Slot number n covers [n, n + 1) * slot_s."""

    def __init__(self, num_slots: int, slot_s: float) -> None:
        self.slot_s = slot_s
        self.num_slots = num_slots
        self._numbers = np.full(num_slots, -1, dtype=np.int64)

    def number_at(self, at_s: float) -> int:
        return math.floor(at_s / self.slot_s)

    def claim(self, number: int) -> tuple[int, bool]:
        """Return the index of slot `number` in the ring (-1 if a newer slot has replaced it), and
        True if the slot is new.

        The caller must set the values of a new slot to zero.
        """
        index = number % self.num_slots
        held = int(self._numbers[index])
        if held > number:
            return -1, False
        self._numbers[index] = number
        return index, held != number

    def live(self, now_s: float) -> NDArray[np.bool_]:
        """Return a boolean mask [num_slots] of the ring's entries that belong to the last
        `num_slots` slots of time, including the current one; the others are stale."""
        newest = self.number_at(now_s)
        return (self._numbers > newest - self.num_slots) & (self._numbers <= newest)


class DurationWindow:
    """The distribution of durations over the last `num_slots * slot_s` seconds.

    Percentiles are accurate to 1 %. The memory is constant.
    """

    def __init__(self, *, num_slots: int = 60, slot_s: float = 1.0) -> None:
        self._slots = _Slots(num_slots, slot_s)
        self._counts = np.zeros((num_slots, _BUCKETS.num), dtype=np.int64)

    def add(self, at_s: float, durations_s: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add durations in seconds at time `at_s`. Each counts as often as its weight in `weights`,
        or once if that is None.

        NaN, weights of 0 and times before the window are ignored.
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
        buckets = _BUCKETS.indexes(values[is_known])
        np.add.at(self._counts[index], buckets, counts[is_known].astype(np.int64))

    def percentiles(self, now_s: float) -> Percentiles:
        """Return the nearest-rank p50, p90 and p99 in seconds, within 1 %, and the number of
        values. The percentiles are None without values."""
        counts = self._counts[self._slots.live(now_s)].sum(axis=0)
        num = int(counts.sum())
        if not num:
            return Percentiles()
        p50_s, p90_s, p99_s = _BUCKETS.percentiles_s(counts, _PERCENTS)
        return Percentiles(p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, num=num)


class SumWindow:
    """Sums of several quantities over the last `num_slots * slot_s` seconds."""

    def __init__(self, num_sums: int, *, num_slots: int = 40, slot_s: float = 0.25) -> None:
        self._slots = _Slots(num_slots, slot_s)
        self._sums = np.zeros((num_slots, num_sums))
        self._begun_s = math.inf

    def add(self, times_s: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Add `values`, of shape [n, num_sums], at the n times `times_s`. Values before the window
        are ignored."""
        if not len(times_s):
            return
        self._begun_s = min(self._begun_s, float(times_s[0]))
        numbers = np.floor(times_s / self._slots.slot_s).astype(np.int64)
        for number in sorted(set(numbers.tolist())):
            index, is_new = self._slots.claim(number)
            if index < 0:
                continue
            if is_new:
                self._sums[index] = 0.0
            self._sums[index] += values[numbers == number].sum(axis=0)

    def sums(self, now_s: float) -> NDArray[np.float64]:
        """Return the sums over the window, of shape [num_sums]."""
        total: NDArray[np.float64] = self._sums[self._slots.live(now_s)].sum(axis=0)
        return total

    def covered_s(self, now_s: float) -> float:
        """Return the time in seconds that the sums cover. It is shorter than the window until the
        first value is as old as the window."""
        slot_s = self._slots.slot_s
        oldest_s = (self._slots.number_at(now_s) - self._slots.num_slots + 1) * slot_s
        return max(now_s - max(oldest_s, self._begun_s), slot_s)
