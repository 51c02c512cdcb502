"""The clocks of the simulated executor: real time, and a virtual time that only calls advance."""

import threading
import time
from typing import Protocol


class WaitableClock(Protocol):
    """A clock that can wait."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        ...

    def wait_until(self, at_s: float, interrupt: threading.Event) -> None:
        """Return at time `at_s`, or earlier if `interrupt` is set."""
        ...


class RealTimeClock:
    """A clock with the system's monotonic clock; setting `interrupt` ends a wait immediately."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def wait_until(self, at_s: float, interrupt: threading.Event) -> None:
        """Sleep until `at_s` or until `interrupt` is set."""
        remaining_s = at_s - time.monotonic()
        if remaining_s > 0.0:
            interrupt.wait(remaining_s)


class VirtualClock:
    """A clock that only `advance` and `wait_until` move; pass the same object to the engine as its
    clock.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`. Raises ValueError when negative."""
        if seconds < 0.0:
            raise ValueError(f"seconds must not be negative, not {seconds}")
        self._now_s += seconds

    def wait_until(self, at_s: float, interrupt: threading.Event) -> None:
        """Jump to `at_s`, unless `at_s` has passed or `interrupt` is set."""
        if not interrupt.is_set():
            self._now_s = max(self._now_s, at_s)
