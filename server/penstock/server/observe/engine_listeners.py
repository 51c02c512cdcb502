"""The one listener of an engine, which forwards to all: flight recorder, recording.

Owns the isolation of faults: a listener that raises is logged and removed; the engine continues.
"""

import logging
from collections.abc import Sequence

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.listener import EngineListener, StepNote
from penstock.scheduler.request import RequestSpec

log = logging.getLogger(__name__)


class EngineListeners:
    """An `EngineListener` in front of several, which may raise."""

    def __init__(self, *listeners: EngineListener) -> None:
        self._listeners = listeners

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EngineListener`."""
        for listener in self._listeners:
            try:
                listener.note_submit(specs)
            except Exception as error:
                self._remove(listener, error)

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """See `EngineListener`."""
        for listener in self._listeners:
            try:
                listener.note_launch(batch, chunks, launched_s)
            except Exception as error:
                self._remove(listener, error)

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """See `EngineListener`."""
        for listener in self._listeners:
            try:
                listener.note_turn(events, note)
            except Exception as error:
                self._remove(listener, error)

    def _remove(self, listener: EngineListener, error: Exception) -> None:
        log.error("%s failed and records no more", type(listener).__name__, exc_info=error)
        self._listeners = tuple(kept for kept in self._listeners if kept is not listener)
