"""The listener of an engine's steps, and what it is called with.

Owns the interface between an engine and a recorder of it. Does not know what is recorded.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.request import RequestSpec


class StepNote(NamedTuple):
    """A step with rows whose result is in. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: planning ended, and the executor got the step;
    `collected_s`: its result had arrived; `updated_s`: and was applied. So what an executor
    computes before `launch` returns is its own time. `num_prefill_tokens` and `num_context_tokens`
    as in `CostModel`. `predicted_s`: the predicted duration of the step, NaN without a prediction.
    `waits_for`: what the next in line lacked when it was planned, None when none waited or all were
    admitted. The counts after it are of the moment when the result was applied.
    """

    batch: Batch
    begun_s: float
    launched_s: float
    num_prefill_tokens: int
    num_context_tokens: int
    predicted_s: float
    waits_for: WaitReason | None
    collected_s: float
    updated_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


class EngineListener(Protocol):
    """Called on the engine's thread in every iteration: it must be quick, and must not raise."""

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """The outputs of one request, leader first, are about to be queued."""
        ...

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """The executor is about to get a step; `chunks`: its rows of prefill, in their order."""
        ...

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """An iteration has ended with these events; `note`: of the step whose result is in them.

        A step without rows has no note; for a self-paced executor each iteration is one step.
        """
        ...
