"""The engine process's loop: fronts in, step, fronts out.

Owns when to step, when to wait and when to look over the books. An engine that is paced by its
executor steps while it has work; one over a self-paced executor steps when that has news, when a
front sent something and when time ends a request. Does not know how the engine was built or what
ends the process.
"""

from collections.abc import Callable

from penstock.server.link.dispatch import Dispatcher
from penstock.server.link.fronts import FrontHub

_MAX_WAIT_S = 60.0
_MAX_SILENCE_S = 1.0
"""How often a self-paced executor is asked that has work and says nothing: it may be dead."""
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
        self._is_self_paced = dispatcher.engine.ready_fd is not None
        if dispatcher.engine.ready_fd is not None:
            hub.watch(dispatcher.engine.ready_fd)

    def stop(self) -> None:
        """Leave `run` before the next step."""
        self._is_stopping = True
        self._hub.wake()

    def run(self) -> None:
        """Serve until `stop`. An exception out of the engine comes through: it is dead."""
        engine = self._dispatcher.engine
        was_busy = False
        while not self._is_stopping:
            has_news = self._hub.poll(self._wait_s(was_busy=was_busy))
            if has_news or engine.has_work or self._clock() >= engine.next_wakeup_s():
                for front_id, frame in self._dispatcher.step():
                    self._hub.send(front_id, frame)
                was_busy = True
            elif was_busy:
                # The books must balance exactly when nothing is in flight; looking is cheap then.
                engine.check_integrity()
                was_busy = False

    def _wait_s(self, *, was_busy: bool) -> float:
        engine = self._dispatcher.engine
        if self._is_stopping:
            return 0.0
        if not engine.has_work:
            most_s = _QUIET_S if was_busy else _MAX_WAIT_S
        elif self._is_self_paced:
            most_s = _MAX_SILENCE_S
        else:
            return 0.0
        return min(most_s, max(0.0, engine.next_wakeup_s() - self._clock()))
