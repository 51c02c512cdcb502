"""Reports the state and the requests of a front (gRPC server process) to the observer.

A timer ticks ten times per second. The delay of a tick is the lag of the event loop. All streams of
the front are delayed by this lag.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from penstock.scheduler.events import Queued
from penstock.server.observe.exporter import Exporter
from penstock.server.observe.frames import FrontRequestView, Heartbeat, Hello
from penstock.server.observe.request_record import UNREADABLE, RequestRecorder
from penstock.server.processes.command_runner import CommandRunner
from penstock.server.rpc.server import FrontServer

_FINAL_RECORDS_S = 0.2
"""How long the observer may take to receive the last records, in seconds."""
_TICK_S = 0.1
_NUM_TICKS_PER_HEARTBEAT = 10


class HeartbeatTimer:
    """Calls `heartbeat` every ten ticks, about once per second, with the lag of each of these ticks
    in seconds. The first call has no lags, and the last call has fewer than ten.

    `clock` returns monotonic seconds. `loop.time()` is not used, because uvloop updates it once per
    iteration, so it does not advance while a callback runs.
    """

    def __init__(
        self,
        heartbeat: Callable[[tuple[float, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self._lags_s: list[float] = []
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick on the running event loop until `stop`. The first heartbeat is immediate."""
        self._heartbeat(())
        self._due_s = self._clock()
        self._wait()

    def stop(self) -> None:
        """Send a last heartbeat, then stop. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._send()

    def _wait(self) -> None:
        now_s = self._clock()
        # Ticks that a blocked event loop missed are counted as one late tick.
        self._due_s = max(self._due_s, now_s - _TICK_S) + _TICK_S
        delay_s = max(0.0, self._due_s - now_s)
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._lags_s.append(max(0.0, self._clock() - self._due_s))
        if len(self._lags_s) >= _NUM_TICKS_PER_HEARTBEAT:
            self._send()
        self._wait()

    def _send(self) -> None:
        lags_s, self._lags_s = tuple(self._lags_s), []
        self._heartbeat(lags_s)


class FrontReporter:
    """Reports the state and the requests of a front to the observer. `path` is the observer's
    socket.

    Create the server with `recorder`, then pass the server to `start`.
    """

    def __init__(self, path: Path, front_id: int) -> None:
        self._front_id = front_id
        self._server: FrontServer | None = None
        self._exporter = Exporter(
            path,
            Hello(front_id=front_id, pid=os.getpid()),
            request_views=self._request_views,
            execute=CommandRunner(f"front {front_id}").execute,
        )
        self._timer = HeartbeatTimer(self._heartbeat)
        self.recorder = RequestRecorder(self._exporter.offer)

    async def start(self, server: FrontServer) -> None:
        """Start reporting the state of `server`, and changes of its connection to the engine.

        Does not wait for the observer.
        """
        self._server = server
        server.on_engine_change = partial(self._heartbeat, ())
        await self._exporter.start()
        self._timer.start()

    async def close(self) -> None:
        """Send the remaining records within `_FINAL_RECORDS_S` seconds, and disconnect."""
        self._timer.stop()
        await self._exporter.close(_FINAL_RECORDS_S)

    def _request_views(self) -> Iterable[FrontRequestView]:
        return () if self._server is None else self._server.front.request_views()

    def _heartbeat(self, loop_lag_s: tuple[float, ...]) -> None:
        assert self._server is not None
        front, recorder = self._server.front, self.recorder
        counters = front.counters
        estimate_s, at_s = _queue_estimate(front.newest_queue_position)
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
                num_disconnected_readers=counters.num_disconnected_readers,
                num_late_events=counters.num_late_events,
                num_unknown_fields=counters.num_unknown_fields,
                num_lowered_priorities=counters.num_lowered_priorities,
                num_internal_errors=counters.num_internal_errors,
                num_records=recorder.num_records,
                dropped_records=self._exporter.dropped | {UNREADABLE: recorder.num_unreadable},
                outcomes=recorder.outcomes(),
                loop_lag_s=loop_lag_s,
                queue_estimate_s=estimate_s,
                queue_estimate_at_s=at_s,
            )
        )


def _queue_estimate(place: Queued | None) -> tuple[float | None, float]:
    """Return the latest estimate of the queue time, in seconds, None if unknown; and its time on
    the monotonic clock. Returns (None, -inf) if no request was queued."""
    return (None, -math.inf) if place is None else (place.estimated_queue_s, place.at_s)
