"""What a front tells of itself: its journal, its line to the observer, its heartbeat, put together.

Owns their composition and their end. A front without an observer has none of it.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from penstock.server.processes.orders import Orders
from penstock.server.rpc.server import FrontServer
from penstock.server.telemetry.beat import Beat
from penstock.server.telemetry.front_view import FrontView
from penstock.server.telemetry.journal import NO_ROOM, Journal
from penstock.server.telemetry.observer_frames import Hello
from penstock.server.telemetry.outbox import Outbox
from penstock.server.telemetry.pulse import Pulse

_LAST_WORDS_S = 0.2
"""How long the observer may take to take the last records."""


class FrontWatch:
    """`path`: the observer's socket. The journal is there from the start, for the server."""

    def __init__(self, path: Path, front_id: int) -> None:
        self._front_id = front_id
        self._server: FrontServer | None = None
        self._outbox = Outbox(
            path,
            Hello(front_id=front_id, pid=os.getpid()),
            live_views=self._live_views,
            carry_out=Orders(f"front {front_id}").carry_out,
        )
        self._pulse = Pulse(self._beat)
        self.journal = Journal(self._outbox.offer)

    async def start(self, server: FrontServer) -> None:
        """Tell of `server` from now on. Does not wait for the observer."""
        self._server = server
        await self._outbox.start()
        self._pulse.start()

    async def close(self) -> None:
        """Say the last words, soon, and hang up."""
        self._pulse.stop()
        await self._outbox.close(_LAST_WORDS_S)

    def _live_views(self) -> Iterable[FrontView]:
        return () if self._server is None else self._server.front.live_views()

    def _beat(self, loop_lag_s: tuple[float, ...]) -> None:
        assert self._server is not None
        front, journal = self._server.front, self.journal
        counters = front.counters
        # The outbox knows why it had no room.
        dropped = {why: num for why, num in journal.dropped_records.items() if why != NO_ROOM}
        self._outbox.tell(
            Beat(
                front_id=self._front_id,
                pid=os.getpid(),
                epoch=0 if front.hello is None else front.hello.epoch,
                is_draining=front.is_draining,
                is_engine_up=front.is_engine_up,
                num_streams=self._server.num_active_calls,
                num_live=self._server.num_live_requests,
                num_backlog_tokens=front.num_backlog_tokens,
                num_submitted=counters.num_submitted,
                num_cut_readers=counters.num_cut_readers,
                num_late_events=counters.num_late_events,
                num_unknown_fields=counters.num_unknown_fields,
                num_internal_errors=counters.num_internal_errors,
                num_records=journal.num_records,
                dropped_records={**dropped, **self._outbox.dropped},
                outcomes=journal.outcomes(),
                loop_lag_s=loop_lag_s,
            )
        )
