"""Base class of the observer's listeners, and two listeners that forward to several others: one in
the engine, one in the observer process.

The forwarding listeners log the exceptions of the listeners that they call. A listener of the
engine that raises is also removed, and the engine continues. Listeners of the observer are called
on its event loop and must not block.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.events import StepEvents
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import EngineListener, StepNote
from penstock.scheduler.request import RequestSpec
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.frames import Heartbeat
from penstock.server.observe.request_record import RequestRecord

logger = logging.getLogger(__name__)
NO_TOTALS: Mapping[str, int] = {}
_MAX_LOGGED_FAILURES = 20


class EngineListeners:
    """An `EngineListener` that forwards to several listeners. If a listener raises, the exception
    is logged and the listener is removed."""

    def __init__(self, *listeners: EngineListener) -> None:
        self._listeners = listeners

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Notify the listeners of a submitted request, before its outputs are queued or
        rejected."""
        self._notify(lambda listener: listener.note_submit(specs))

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        """Notify the listeners that a step is about to be launched."""
        self._notify(lambda listener: listener.note_launch(batch, chunks, launched_s))

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        """Notify the listeners of the events of an iteration."""
        self._notify(lambda listener: listener.note_iteration(events, note))

    def _notify(self, call: Callable[[EngineListener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                logger.exception("%s failed and stops recording", type(listener).__name__)
                self._listeners = tuple(kept for kept in self._listeners if kept is not listener)


class ServiceListener:
    """Base class of the observer's listeners. Subclasses override the methods of the events that
    they use. A record or a step is delivered at most once."""

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Called with the records of ended requests."""

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Called with the heartbeat of a front (gRPC server process)."""

    def set_engine(self, hello: EngineHello) -> None:
        """Called with the first frame from the engine, each time the observer connects to it."""

    def add_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Called with steps of the engine of `epoch`: rows of `flight.layout.STEP`, the oldest
        first.

        `num_missed` is the number of preceding steps that were overwritten before they were read.
        `totals` has the engine's counts (`flight.layout.TOTALS`); they include overwritten steps.
        """

    def front_disconnected(self, front_id: int) -> None:
        """Called when a front has disconnected. Its gauges must be removed."""


class ServiceListeners(ServiceListener):
    """Forwards to `listeners` and logs their exceptions. `num_failures` is the number of calls that
    raised."""

    def __init__(self, *listeners: ServiceListener) -> None:
        self.num_failures = 0
        self._listeners = list(listeners)

    def add(self, listener: ServiceListener) -> None:
        """Add a listener. It receives all later events."""
        self._listeners.append(listener)

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Pass the records of ended requests to the listeners."""
        self._notify(lambda listener: listener.add_records(records))

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Pass a front's heartbeat to the listeners."""
        self._notify(lambda listener: listener.add_heartbeat(heartbeat))

    def set_engine(self, hello: EngineHello) -> None:
        """Pass the first frame from the engine to the listeners."""
        self._notify(lambda listener: listener.set_engine(hello))

    def add_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Pass steps of the engine of `epoch` to the listeners."""
        self._notify(lambda listener: listener.add_steps(epoch, rows, num_missed, totals))

    def front_disconnected(self, front_id: int) -> None:
        """Notify the listeners that a front has disconnected."""
        self._notify(lambda listener: listener.front_disconnected(front_id))

    def _notify(self, call: Callable[[ServiceListener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                self.num_failures += 1
                # An error that repeats with every record must not fill the disk with log lines.
                if self.num_failures <= _MAX_LOGGED_FAILURES:
                    logger.exception("%s failed on what it received", type(listener).__name__)
