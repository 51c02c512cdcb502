"""Two listeners that forward to several: one of the engine, one of the observer process.

Owns the isolation of faults: a listener of the engine that raises is logged and removed, and the
engine continues. Calls in the observer come on its event loop and must not block.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.listener import EngineListener, StepNote
from penstock.scheduler.request import RequestSpec
from penstock.server.link.frames import EngineHello
from penstock.server.observe.frames import Heartbeat
from penstock.server.observe.request_record import RequestRecord

log = logging.getLogger(__name__)
NO_TOTALS: Mapping[str, int] = {}
_MAX_LOGGED_FAILURES = 20


class EngineListeners:
    """An `EngineListener` that forwards to several listeners, which may raise."""

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
        log.error("%s failed and stops recording", type(listener).__name__, exc_info=error)
        self._listeners = tuple(kept for kept in self._listeners if kept is not listener)


class ServiceListener:
    """Base class; override the events to receive. Each event is delivered once."""

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """Receive the records of ended requests."""

    def take_heartbeat(self, beat: Heartbeat) -> None:
        """Receive a front's heartbeat."""

    def take_engine(self, hello: EngineHello) -> None:
        """Receive the startup report of a new engine."""

    def take_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Receive steps of the engine of `epoch`: rows of `flight.layout.STEP`, oldest first.

        `num_missed`: number of preceding steps that were overwritten unread. `totals`: the engine's
        own counts (`flight.layout.TOTALS`), which include every step.
        """

    def front_gone(self, front_id: int) -> None:
        """Called when a front has ended: its gauges no longer count."""


class ServiceListeners(ServiceListener):
    """Forwards to `listeners`, which may raise. `num_failures`: number of calls that raised."""

    def __init__(self, *listeners: ServiceListener) -> None:
        self.num_failures = 0
        self._listeners = list(listeners)

    def add(self, listener: ServiceListener) -> None:
        """Add a listener."""
        self._listeners.append(listener)

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """See `ServiceListener`."""
        self._each(lambda listener: listener.take_records(records))

    def take_heartbeat(self, beat: Heartbeat) -> None:
        """See `ServiceListener`."""
        self._each(lambda listener: listener.take_heartbeat(beat))

    def take_engine(self, hello: EngineHello) -> None:
        """See `ServiceListener`."""
        self._each(lambda listener: listener.take_engine(hello))

    def take_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """See `ServiceListener`."""
        self._each(lambda listener: listener.take_steps(epoch, rows, num_missed, totals))

    def front_gone(self, front_id: int) -> None:
        """See `ServiceListener`."""
        self._each(lambda listener: listener.front_gone(front_id))

    def _each(self, call: Callable[[ServiceListener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                self.num_failures += 1
                # An error that repeats with every record must not fill the disk.
                if self.num_failures <= _MAX_LOGGED_FAILURES:
                    log.exception("%s failed on what it received", type(listener).__name__)
