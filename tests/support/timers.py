"""A clock that the test advances, with the timers that depend on it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class FakeTimer:
    when: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeTimers:
    """The part of an event loop that timers use. `num_set`: number of timers set in total."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_set = 0
        self._timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], None], /) -> FakeTimer:
        self.num_set += 1
        self._timers.append(FakeTimer(when, callback))
        return self._timers[-1]

    @property
    def pending(self) -> list[float]:
        """The due times of the timers that have neither run nor been cancelled, sorted."""
        return sorted(timer.when for timer in self._timers if not timer.is_cancelled)

    def advance(self, duration_s: float) -> None:
        """Advance the time; call the due timers in order, each at the time for which it was set."""
        end_s = self.now_s + duration_s
        while due := [t for t in self._timers if t.when <= end_s and not t.is_cancelled]:
            timer = min(due, key=lambda timer: timer.when)
            self._timers.remove(timer)
            self.now_s = max(self.now_s, timer.when)
            timer.callback()
        self.now_s = end_s
