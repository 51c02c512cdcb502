"""Figures from the engine's steps: load, throughput, inter-token latency.

Owns the figures that are computed from rows of the flight recorder. Times are seconds on the
machine's monotonic clock. Lives as long as the observer, over several engines.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import WaitReason
from penstock.server.observe.flight.layout import NO_REASON
from penstock.server.observe.operations.snapshot import Percentiles
from penstock.server.observe.operations.window import DurationWindow, SumWindow

_PREFILL, _DECODE, _STEPS, _STEP_S = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates over the last ten seconds. `mean_step_s` None: there was no step."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_step_s: float | None


class EngineSteps:
    """Takes rows of `flight.layout.STEP`; frequently read figures are attributes.

    The numbers of steps, tokens and preemptions are totals over all engines. Steps that were
    overwritten unread count as steps only. `updated_s`: time of the newest step.
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

    def take(self, epoch: int, rows: NDArray[Any], num_missed: int) -> None:
        """Add steps of the engine of `epoch`, oldest first; steps of older engines are ignored."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self._forget_engine()
            self.epoch = epoch
        self.num_steps += len(rows) + num_missed
        if not len(rows):
            return
        self.num_tokens += int(rows["num_tokens"].sum(dtype=np.int64))
        self.num_preempted += int(rows["num_preempted"].sum(dtype=np.int64))
        updated_s = rows["updated_s"]
        # The later of two steps in flight waits for the other, so no time counts twice.
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

    def engine_gone(self) -> None:
        """The engine is down: it runs no requests and has no blocks."""
        self._forget_engine()

    def rates(self, now_s: float) -> Rates:
        """Speeds."""
        sums, covered_s = self._sums.sums(now_s), self._sums.covered_s(now_s)
        num_steps = sums[_STEPS]
        return Rates(
            prefill_tokens_per_s=float(sums[_PREFILL] / covered_s),
            decode_tokens_per_s=float(sums[_DECODE] / covered_s),
            mean_step_s=float(sums[_STEP_S] / num_steps) if num_steps else None,
        )

    def itl(self, now_s: float) -> Percentiles:
        """Percentiles of the inter-token latency over the last minute."""
        return self._itl.percentiles(now_s)

    def no_live_requests(self) -> None:
        """Record that no request is live, although the last step, which may be old, had some.

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

    def _forget_engine(self) -> None:
        self.num_running = self.num_waiting = 0
        self.num_used_blocks = self.num_cached_blocks = self.num_free_blocks = 0
        self.waits_for = ""


def wait_reason_name(value: int) -> str:
    """The name of a WaitReason; empty for none and for unknown ones."""
    if value == NO_REASON:
        return ""
    try:
        return WaitReason(value).name
    except ValueError:
        return ""
