"""A front's heartbeat: its state for the observer once a second, and how late its loop runs.

Owns the ticks. The lateness of a tick is what every stream of the front waited too. Does not know
what a beat is made of, nor where it goes.
"""

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.1
_NUM_TICKS_PER_BEAT = 10


class Pulse:
    """Calls `beat` once a second with the lateness of each tick since, seconds.

    `clock` gives monotonic seconds; not the loop's time, which stands still while a callback runs.
    """

    def __init__(
        self,
        beat: Callable[[tuple[float, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat = beat
        self._clock = clock
        self._lags_s: list[float] = []
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick on the running loop until `stop`. The first beat comes at once."""
        self._beat(())
        self._due_s = self._clock()
        self._wait()

    def stop(self) -> None:
        """No more ticks, after one last beat. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._tell()

    def _wait(self) -> None:
        now_s = self._clock()
        # Ticks that a blocked loop missed are one late tick, not many.
        self._due_s = max(self._due_s, now_s - _TICK_S) + _TICK_S
        delay_s = max(0.0, self._due_s - now_s)
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._lags_s.append(max(0.0, self._clock() - self._due_s))
        if len(self._lags_s) >= _NUM_TICKS_PER_BEAT:
            self._tell()
        self._wait()

    def _tell(self) -> None:
        lags_s, self._lags_s = tuple(self._lags_s), []
        self._beat(lags_s)
