"""Who listens in the observer process, and to what.

Owns the protocol between the hub, which hears everything, and traces, metrics and operations, which
make something of it. All calls come on the observer's event loop; they must not block.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.server.observe.heartbeat import Beat
from penstock.server.observe.request_record import RequestRecord


class Consumer(Protocol):
    """Takes what it is told. Nothing is told twice."""

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """Requests that have ended."""
        ...

    def take_beat(self, beat: Beat) -> None:
        """A front's state."""
        ...

    def take_steps(self, epoch: int, rows: NDArray[Any], num_missed: int) -> None:
        """New steps of the engine of `epoch`: rows of `flight.layout.STEP`, oldest first.

        `num_missed`: steps before them that were overwritten unread.
        """
        ...

    def front_gone(self, front_id: int) -> None:
        """A front is no more: its gauges are nobody's."""
        ...
