"""The backlog of one request: events that its writer has not taken yet.

Owns one list: the engine's events are appended, and the writer takes everything at once. So a write
carries all events since the last write: one token while the reader keeps up, more under load, and
at least as many as its client wants in a message. Tokens are counted per output, because a message
carries tokens of one output only; at most one timer runs at a time, and it is not reset for each
token. The writer serves this stream alone, or many streams (`watched_write.py`). Does not know
gRPC, nor what the events mean.

Single event loop; appending never blocks.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from penstock.server.front.errors import Refusal, RequestError
from penstock.server.front.events import IdRecords, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.generation import WHOLE_BACKLOG, ChunkLimits
from penstock.server.front.watched_write import WatchedWrite

_FEW: Final = 256
"""Up to this many pieces of output are taken at once without checking their size."""
_MAX_COST: Final = 6000
"""Maximum cost of the events taken at once: a piece of output costs one, each of its records and
alternatives one more; three characters of a prompt cost one, and a part with log probabilities the
maximum. Writing that much takes some milliseconds.
"""


class Timer(Protocol):
    """The result of `Timers.call_at`."""

    def cancel(self) -> None:
        """Cancel the callback."""
        ...


class Timers(Protocol):
    """The methods of an event loop that are used here. Times are seconds on its clock."""

    def time(self) -> float:
        """Return the current time."""
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
        """Make everything so far due."""
        self._is_all_due = True

    def stop(self) -> None:
        """Hold nothing any more: the stream has ended."""
        self._is_all_due = self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def settle(self) -> bool:
        """Return whether events are due after a batch; set the timer for the rest."""
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
        """Record that everything due has been taken."""
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


class TokenStream(WatchedWrite):
    """The backlog between the engine and one writer.

    `num_backlog_tokens`: tokens appended and not taken. `is_closed`: nothing more will be appended.
    `timers`: the running loop unless given; required by `chunks` that hold tokens back.
    """

    __slots__ = (
        "_events",
        "_has_prompt",
        "_hold",
        "_on_ready",
        "_refusal",
        "_text",
        "_waiter",
        "is_closed",
        "is_cut",
        "num_backlog_tokens",
    )

    def __init__(self, chunks: ChunkLimits = WHOLE_BACKLOG, timers: Timers | None = None) -> None:
        super().__init__()
        self._events: list[StreamEvent] = []
        # All of the backlog, if it is the text of one token of output 0: see `push_text`.
        self._text: str | None = None
        self._has_prompt = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._refusal: Refusal | None = None
        self.is_closed = False
        self._hold: ChunkHold | None = None
        if chunks.is_holding:
            self._hold = ChunkHold(chunks, timers or asyncio.get_running_loop(), self.wake)
        self.is_cut = False
        self.num_backlog_tokens = 0

    @property
    def is_drained(self) -> bool:
        """True once nothing more will be taken."""
        return self.is_closed and not self.has_backlog

    @property
    def has_backlog(self) -> bool:
        """Whether there are events that were not taken."""
        return bool(self._events) or self._text is not None

    @property
    def refusal(self) -> Refusal | None:
        """The error that the stream failed with; None if it did not fail."""
        return self._refusal

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` instead of waking `take`: the stream shares its writer with others.

        It is not called for the present backlog.
        """
        self._on_ready = on_ready

    def push(self, event: StreamEvent) -> None:
        """Append an event; a closed stream drops it. Does not wake the writer: see `wake`."""
        if isinstance(event, TokensPiece):
            self.push_tokens(event)
        elif not self.is_closed:
            self._keep_text()
            self._events.append(event)
            self._has_prompt = self._has_prompt or isinstance(event, PromptPiece)
            if self._hold is not None:
                self._hold.add(event)

    def push_tokens(self, piece: TokensPiece) -> None:
        """Like `push`, for the most frequent event."""
        if self.is_closed:
            return
        self._keep_text()
        self._events.append(piece)
        self.num_backlog_tokens += piece.num_tokens
        if self._hold is not None:
            self._hold.add(piece)

    def push_text(self, text: str) -> None:
        """Like `push`, for one token of output 0 that has only text.

        This is the most frequent case; `take_text` takes the token before the next one arrives, and
        no event is made.
        """
        if self._events or self.num_backlog_tokens or self._hold is not None or self.is_closed:
            self.push_tokens(TokensPiece(0, text, 1, ()))
            return
        self._text = text
        self.num_backlog_tokens = 1

    def take_text(self) -> str | None:
        """Take the backlog if it is the text of one token of output 0; else return None."""
        text = self._text
        if text is not None:
            self._text = None
            self.num_backlog_tokens = 0
        return text

    def release_held(self) -> None:
        """Send tokens held back for a larger message with the next write."""
        if self._hold is not None:
            self._hold.release()

    def close(self) -> None:
        """End the stream: the backlog will be taken, then `take` returns nothing."""
        self.is_closed = True
        if self._hold is not None:
            self._hold.stop()

    def fail(self, refusal: Refusal) -> None:
        """End the stream with an error: the backlog will be taken, then `take` raises."""
        if not self.is_closed:
            self._refusal = refusal
            self.close()

    def cut(self, refusal: Refusal) -> None:
        """Disconnect the reader: drop the backlog and interrupt a blocked write.

        Also works on a closed stream whose end was not taken. The writer is cancelled;
        `was_cut_off` distinguishes this from a cancellation by its peer.
        """
        if self.is_cut:
            return
        self.is_cut = True
        self._refusal = refusal
        self._events.clear()
        self._text = None
        self.num_backlog_tokens = 0
        self.close()
        self.break_off()
        self.wake()

    def wake(self) -> None:
        """Wake the writer if there is something to take. Call once after a batch of events."""
        if self._hold is not None and not self._hold.settle():
            return
        if self._on_ready is not None:
            self._on_ready()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[StreamEvent]:
        """Take everything that is due since the last call; wait for at least one event.

        Returns an empty list at the end; raises RequestError if the stream failed.
        """
        while not (events := self.take_due()):
            if self._refusal is not None:
                raise RequestError(self._refusal)
            if self.is_closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return events

    def take_due(self, max_tokens: int | None = None) -> list[StreamEvent]:
        """Take what is due now, at most `max_tokens` of output; may return nothing.

        Events behind a piece that exceeds `max_tokens` wait with it. Returns no more than can be
        written in one iteration of the event loop; `on_ready` is called again for the rest.
        """
        if self._text is not None:
            self._keep_text()
        is_small = len(self._events) <= _FEW and not self._has_prompt
        if is_small and self._hold is None and max_tokens is None:
            events, self._events = self._events, []
            self.num_backlog_tokens = 0
            return events
        due, held = (self._events, []) if self._hold is None else self._hold.split(self._events)
        num_due = len(due) if max_tokens is None else _num_within(due, max_tokens)
        if not is_small:
            num_due = self._num_at_once(due, num_due)
        taken, self._events = due[:num_due], due[num_due:] + held
        self.num_backlog_tokens -= num_tokens_of(taken)
        if self._hold is not None and num_due == len(due):
            self._hold.forget_due()
        return taken

    def _num_at_once(self, due: list[StreamEvent], num_due: int) -> int:
        """Return how many of the first `num_due` are taken now; schedule the others."""
        num_now = _num_in_a_turn(due, num_due)
        if num_now < num_due and self._on_ready is not None:
            asyncio.get_running_loop().call_soon(self.wake)
        if num_now == len(due):
            self._has_prompt = False
        return num_now

    def _keep_text(self) -> None:
        """Make an event of a token that `take_text` has not taken."""
        if self._text is not None:
            self._events.append(TokensPiece(0, self._text, 1, ()))
            self._text = None


def num_tokens_of(events: list[StreamEvent]) -> int:
    """Return the number of output tokens in `events`."""
    return sum(event.num_tokens for event in events if isinstance(event, TokensPiece))


def _num_within(events: list[StreamEvent], max_tokens: int) -> int:
    """Return how many of `events`, from the first, have at most `max_tokens` of output in total."""
    num_left = max_tokens
    for position, event in enumerate(events):
        if isinstance(event, TokensPiece):
            num_left -= event.num_tokens
            if num_left < 0:
                return position
    return len(events)


def _num_in_a_turn(events: list[StreamEvent], num: int) -> int:
    """Return how many of the first `num` fit one iteration of the loop."""
    cost = 0
    for position in range(num):
        event = events[position]
        if isinstance(event, PromptPiece):
            cost += len(event.text) // 3
            is_cheap = isinstance(event.records, IdRecords) or not event.records
            cost += len(event.records) if is_cheap else _MAX_COST
        elif isinstance(event, TokensPiece):
            cost += 1 + sum([1 + len(record.top) for record in event.records])
        if cost > _MAX_COST:
            return max(1, position)
    return num
