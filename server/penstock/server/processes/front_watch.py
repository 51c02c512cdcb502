"""What a front reports: its recorder, its exporter to the observer, its heartbeat, put together.

Owns their composition and shutdown. A front without an observer has none of it.
"""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.scheduler.events import Queued, StepEvents
from penstock.server.link.frames import EngineHello
from penstock.server.link.ports import EngineListener
from penstock.server.observe.exporter import Exporter
from penstock.server.observe.frames import FrontView, Hello
from penstock.server.observe.heartbeat import Heartbeat, HeartbeatTimer
from penstock.server.observe.request_recorder import NO_ROOM, RequestRecorder
from penstock.server.processes.command_runner import Orders
from penstock.server.rpc.server import FrontServer

_LAST_WORDS_S = 0.2
"""How long the observer may take to receive the last records."""


class FrontWatch:
    """`path`: the observer's socket. The recorder is there from the start, for the server."""

    def __init__(self, path: Path, front_id: int) -> None:
        self._front_id = front_id
        self._server: FrontServer | None = None
        self._exporter = Exporter(
            path,
            Hello(front_id=front_id, pid=os.getpid()),
            live_views=self._live_views,
            carry_out=Orders(f"front {front_id}").carry_out,
        )
        self._timer = HeartbeatTimer(self._beat)
        self.recorder = RequestRecorder(self._exporter.offer)

    def hearing(self, listener: EngineListener) -> EngineListener:
        """`listener`, with a beat sent as soon as an engine connects or is lost."""
        return _EngineNews(listener, self._tell_now)

    async def start(self, server: FrontServer) -> None:
        """Report on `server` from now on. Does not wait for the observer."""
        self._server = server
        await self._exporter.start()
        self._timer.start()

    async def close(self) -> None:
        """Send the final message, and disconnect."""
        self._timer.stop()
        await self._exporter.close(_LAST_WORDS_S)

    def _live_views(self) -> Iterable[FrontView]:
        return () if self._server is None else self._server.front.live_views()

    def _tell_now(self) -> None:
        if self._server is not None:  # otherwise the first beat is still to be sent
            self._beat(())

    def _beat(self, loop_lag_s: tuple[float, ...]) -> None:
        assert self._server is not None
        front, recorder = self._server.front, self.recorder
        counters = front.counters
        estimate_s, at_s = _queue_estimate(front.newest_place)
        # The exporter knows why it had no room.
        dropped = {why: num for why, num in recorder.dropped_records.items() if why != NO_ROOM}
        self._exporter.send_heartbeat(
            Heartbeat(
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
                num_lowered_priorities=counters.num_lowered_priorities,
                num_internal_errors=counters.num_internal_errors,
                num_records=recorder.num_records,
                dropped_records={**dropped, **self._exporter.dropped},
                outcomes=recorder.outcomes(),
                loop_lag_s=loop_lag_s,
                queue_estimate_s=estimate_s,
                queue_estimate_at_s=at_s,
            )
        )


class _EngineNews:
    """An `EngineListener` that wraps another; `tell` is called after each change."""

    def __init__(self, listener: EngineListener, tell: Callable[[], None]) -> None:
        self._listener = listener
        self._tell = tell

    def on_hello(self, hello: EngineHello) -> None:
        self._listener.on_hello(hello)
        self._tell()

    def on_events(self, events: StepEvents) -> None:
        self._listener.on_events(events)

    def on_lost(self) -> None:
        self._listener.on_lost()
        self._tell()


def _queue_estimate(place: Queued | None) -> tuple[float | None, float]:
    """The last estimate of the queue time, and when it was made."""
    return (None, -math.inf) if place is None else (place.estimated_queue_s, place.at_s)
