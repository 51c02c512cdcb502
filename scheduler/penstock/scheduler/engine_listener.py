"""The listener of an engine's steps.

Owns the interface between an engine and a recorder of it. Does not know what is recorded.
"""

from collections.abc import Sequence
from typing import Protocol

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents
from penstock.scheduler.flight import Chunk
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.step_note import StepNote


class EngineListener(Protocol):
    """Called on the engine's thread, in every turn: it must be quick, and must not raise."""

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """The outputs of one request, leader first, are about to be queued."""
        ...

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """The executor is about to get a step; `chunks`: its rows of prefill, in their order."""
        ...

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """A turn has ended with these events; `note`: of the step whose result is in them.

        A step without rows has none, and for a self-paced executor a turn is one step.
        """
        ...
