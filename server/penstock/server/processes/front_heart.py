"""A front's heartbeat: the proof that its event loop comes round.

Owns the timer. Who judges it is the supervisor.
"""

import asyncio

from penstock.server.link.board import FrontBeat

BEATS_PER_LOOK = 4
"""The one who looks must find a new one every time."""


class FrontHeart:
    """Beats every `interval_s` from `start` to `stop`; not at all where nobody looks (None)."""

    def __init__(self, beat: FrontBeat | None, interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat now, and go on. Call it on the loop."""
        if self._beat is None:
            return
        self._beat.beat()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self.start)

    def stop(self) -> None:
        """No more beats. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
