"""Holds tokens of a stream back until a message has as many as its client asked for.

Owns the counts, the times and the one timer. Does not know streams or writers. Outputs are held
separately, because a message carries tokens of one only.

Single event loop. At most one timer at a time, which is not reset for each token: when its tokens
were sent already, it is set again for the next ones.
"""

from collections.abc import Callable
from typing import Protocol

from penstock.server.front.events import StreamEvent, TokensPiece
from penstock.server.front.generation import ChunkLimits


class Timer(Protocol):
    """What `Timers.call_at` returns."""

    def cancel(self) -> None:
        """Cancel the callback."""
        ...


class Timers(Protocol):
    """The part of an event loop that is used here. Times are seconds on its clock."""

    def time(self) -> float:
        """The time now."""
        ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        """Call `callback` at `when`."""
        ...


class ChunkHold:
    """The tokens that one stream holds back. `on_due` is called when a delay has passed."""

    __slots__ = (
        "_is_all_due",
        "_is_stopped",
        "_known",
        "_limits",
        "_num_held",
        "_on_due",
        "_send_at",
        "_timer",
        "_timers",
    )

    def __init__(self, limits: ChunkLimits, timers: Timers, on_due: Callable[[], None]) -> None:
        self._limits = limits
        self._timers = timers
        self._on_due = on_due
        self._known: set[int] = set()
        self._num_held: dict[int, int] = {}
        self._send_at: dict[int, float] = {}
        self._is_all_due = False
        self._is_stopped = False
        self._timer: Timer | None = None

    @property
    def is_due(self) -> bool:
        """Whether there are tokens to send."""
        return self._is_all_due or len(self._send_at) < len(self._num_held)

    def add(self, event: StreamEvent) -> None:
        """Add an event. Events other than tokens, and an output's first token, are due at once."""
        if not isinstance(event, TokensPiece):
            self._is_all_due = True
            return
        index = event.output_index
        if index not in self._known:
            self._known.add(index)
            self._is_all_due = True
        num_held = self._num_held.get(index)
        if num_held is None:
            self._send_at[index] = self._timers.time() + self._limits.max_delay_s
            num_held = 0
        num_held += event.num_tokens
        self._num_held[index] = num_held
        if num_held >= self._limits.min_tokens:
            self._send_at.pop(index, None)

    def release(self) -> None:
        """Everything so far is due."""
        self._is_all_due = True

    def stop(self) -> None:
        """The stream has ended: nothing is held any more."""
        self._is_all_due = self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def settle(self) -> bool:
        """After a batch of events: whether any are due. Sets the timer for the rest."""
        if self._is_all_due:
            return True
        if self._timer is None and self._send_at:
            self._timer = self._timers.call_at(min(self._send_at.values()), self._time_is_up)
        return self.is_due

    def split(self, events: list[StreamEvent]) -> tuple[list[StreamEvent], list[StreamEvent]]:
        """Split the backlog into what is due and what waits; keeps the order within an output."""
        if self._is_all_due:
            return events, []
        if not self.is_due:
            return [], events
        due: list[StreamEvent] = []
        held: list[StreamEvent] = []
        for event in events:
            # Any other event would have made everything due.
            is_held = isinstance(event, TokensPiece) and event.output_index in self._send_at
            (held if is_held else due).append(event)
        return due, held

    def forget_due(self) -> None:
        """All that was due has been taken."""
        if self._is_all_due:
            self._is_all_due = self._is_stopped
            self._num_held.clear()
            self._send_at.clear()
            return
        for index in [index for index in self._num_held if index not in self._send_at]:
            del self._num_held[index]

    def _time_is_up(self) -> None:
        self._timer = None
        now_s = self._timers.time()
        for index in [index for index, at_s in self._send_at.items() if at_s <= now_s]:
            del self._send_at[index]
        if self.settle():
            self._on_due()
