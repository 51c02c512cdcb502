"""The timer of the heartbeats that a front (gRPC server process) sends to the observer.

The timer ticks ten times per second. The delay of a tick is the lag of the event loop, which delays
all streams of the front.
"""

import asyncio
import time
from collections.abc import Callable

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
