"""The listener of an engine's steps, and its arguments.

Owns the interface between an engine and its recorder. Does not know what is recorded.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents, WaitReason
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.request import RequestSpec


class StepNote(NamedTuple):
    """A step with rows whose result was applied. Times are seconds on the engine's clock.

    `begun_s`: planning began; `launched_s`: planning ended and the executor got the step;
    `collected_s`: its result had arrived; `updated_s`: the result was applied. So the time that an
    executor spends in `launch` counts as its own. `num_prefill_tokens` and `num_context_tokens` as
    in `CostModel`. `predicted_s`: the predicted duration of the step, NaN without a prediction.
    `waits_for`: what the next request in the queue lacked when the step was planned, None if none
    waited or all were admitted. The fields after it are counts at the time when the result was
    applied.
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
    """Called on the engine's thread in every iteration: it must return quickly and must not
    raise.
    """

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Called before the outputs of one request, leader first, are queued."""
        ...

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """Called before the executor gets a step; `chunks`: its prefill rows, in order."""
        ...

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """Called when an iteration has ended with these events; `note`: the step whose result they
        contain.

        A step without rows has no note; for a self-paced executor each iteration is one step.
        """
        ...
