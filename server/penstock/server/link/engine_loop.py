"""The engine process's loop: fronts in, step, fronts out.

Owns when to step, when to wait and when to look over the books. Does not know how the engine was
built or what ends the process.
"""

from collections.abc import Callable

from penstock.server.link.dispatch import Dispatcher
from penstock.server.link.fronts import FrontHub

_MAX_WAIT_S = 60.0
_QUIET_S = 0.05
"""How long nothing must come before the books are looked over: not between two requests."""


class EngineLoop:
    """Runs one engine for the fronts of one hub, on the calling thread.

    `clock` is the engine's. `stop()` may be called from a signal handler or another thread.
    """

    def __init__(self, dispatcher: Dispatcher, hub: FrontHub, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._hub = hub
        self._clock = clock
        self._is_stopping = False

    def stop(self) -> None:
        """Leave `run` before the next step."""
        self._is_stopping = True
        self._hub.wake()

    def run(self) -> None:
        """Serve until `stop`. An exception out of the engine comes through: it is dead."""
        engine = self._dispatcher.engine
        was_busy = False
        while not self._is_stopping:
            self._hub.poll(min(_QUIET_S, self._wait_s()) if was_busy else self._wait_s())
            if engine.has_work or self._clock() >= engine.next_wakeup_s():
                for front_id, frame in self._dispatcher.step():
                    self._hub.send(front_id, frame)
                was_busy = True
            elif was_busy:
                # The books must balance exactly when nothing is in flight; looking is cheap then.
                engine.check_integrity()
                was_busy = False

    def _wait_s(self) -> float:
        engine = self._dispatcher.engine
        if engine.has_work or self._is_stopping:
            return 0.0
        return min(_MAX_WAIT_S, max(0.0, engine.next_wakeup_s() - self._clock()))
