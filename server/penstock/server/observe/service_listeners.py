"""The one listener of the observer process, which forwards to all: spans, metrics, operations.

Owns the protocol and the isolation of faults. Calls come on the observer's event loop and must not
block.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.server.link.frames import EngineHello
from penstock.server.observe.heartbeat import Heartbeat
from penstock.server.observe.request_record import RequestRecord

log = logging.getLogger(__name__)

NO_TOTALS: Mapping[str, int] = {}
_MAX_LOGGED_FAILURES = 20


class ServiceListener:
    """Base class; override the events to receive. Each event is delivered once."""

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """Requests have ended."""

    def take_heartbeat(self, beat: Heartbeat) -> None:
        """A front has sent a heartbeat."""

    def take_engine(self, hello: EngineHello) -> None:
        """An engine is up."""

    def take_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Steps of the engine of `epoch`: rows of `flight.layout.STEP`, oldest first.

        `num_missed`: steps before them that were overwritten unread. `totals`: the engine's own
        counts (`flight.layout.TOTALS`), which miss no step.
        """

    def front_gone(self, front_id: int) -> None:
        """A front has ended: its gauges no longer count."""


class ServiceListeners(ServiceListener):
    """Forwards to `listeners`, which may raise and grow. `num_failures`: calls that raised."""

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
