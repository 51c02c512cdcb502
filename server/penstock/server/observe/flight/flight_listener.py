"""Listens to an engine for the flight recorder, and keeps the recorder's faults from it.

A fault of the recorder ends the recording, never the service.
"""

import logging
from collections.abc import Sequence

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents
from penstock.scheduler.flight import Chunk
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.step_note import StepNote
from penstock.server.observe.flight.writer import FlightWriter

log = logging.getLogger(__name__)


class FlightListener:
    """An `EngineListener` that hands everything to `writer`, until that one fails."""

    def __init__(self, writer: FlightWriter) -> None:
        self._writer: FlightWriter | None = writer

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EngineListener`."""
        if self._writer is not None:
            try:
                self._writer.note_submit(specs)
            except Exception as error:
                self._give_up(error)

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """See `EngineListener`."""
        if self._writer is not None:
            try:
                self._writer.note_launch(batch, chunks, launched_s)
            except Exception as error:
                self._give_up(error)

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """See `EngineListener`."""
        if self._writer is not None:
            try:
                self._writer.note_turn(events, note)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # A bug there must not look like one of the engine's.
        log.error("the flight recorder failed and writes no more", exc_info=error)
        self._writer = None
