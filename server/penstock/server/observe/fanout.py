"""Everybody who listens, as one listener.

Owns that one who trips takes nobody else's news away: traces, metrics and operations fail apart.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.server.observe.heartbeat import Beat
from penstock.server.observe.listener import Consumer
from penstock.server.observe.request_record import RequestRecord

log = logging.getLogger(__name__)

_MAX_TOLD_FAILURES = 20


class Fanout:
    """A `Consumer` before several, looked up each time. `num_failures`: calls that raised."""

    def __init__(self, consumers: Iterable[Consumer]) -> None:
        self.num_failures = 0
        self._consumers = consumers

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """See `Consumer`."""
        self._each(lambda consumer: consumer.take_records(records))

    def take_beat(self, beat: Beat) -> None:
        """See `Consumer`."""
        self._each(lambda consumer: consumer.take_beat(beat))

    def take_steps(self, epoch: int, rows: NDArray[Any], num_missed: int) -> None:
        """See `Consumer`."""
        self._each(lambda consumer: consumer.take_steps(epoch, rows, num_missed))

    def front_gone(self, front_id: int) -> None:
        """See `Consumer`."""
        self._each(lambda consumer: consumer.front_gone(front_id))

    def _each(self, tell: Callable[[Consumer], None]) -> None:
        for consumer in self._consumers:
            try:
                tell(consumer)
            except Exception:
                self.num_failures += 1
                # A fault of ours that comes with every record must not fill the disk.
                if self.num_failures <= _MAX_TOLD_FAILURES:
                    log.exception("%s tripped over what it was told", type(consumer).__name__)
