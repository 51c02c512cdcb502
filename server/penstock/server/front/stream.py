"""The backlog of one request: events that the writer has not taken yet.

The backlog is one list: the engine's events are appended, and the writer takes all that are due at
once. A write therefore carries one token while the reader keeps up, and more under load or if the
client requested larger messages. For these, tokens are held back. They are counted per output,
because a message carries tokens of one output only. At most one timer runs for them, and it is not
reset for each token. The writer serves only this stream, or many streams (`watched_write.py`). Does
not use gRPC and does not interpret the events.

All code runs on one event loop; appending never blocks.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from penstock.server.front.errors import Failure, RequestError
from penstock.server.front.events import IdRecords, PromptPiece, StreamEvent, TokensPiece
from penstock.server.front.generation import NO_CHUNK_LIMITS, ChunkLimits
from penstock.server.front.watched_write import WatchedWrite

_FEW: Final = 256
"""Up to this number of events, none of them a part of a prompt, are taken without computing their
cost."""
_MAX_COST: Final = 6000
"""Maximum cost of the events taken at once, which takes some milliseconds to write.

A `TokensPiece` costs 1, and each of its records and of their `top` tokens costs 1 more. Three
characters or one token id of a prompt cost 1; a part of a prompt with log probabilities has the
maximum cost.
"""


class Timer(Protocol):
    """The return value of `Timers.call_at`."""

    def cancel(self) -> None:
        """Cancel the scheduled callback."""
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
    """Decides which tokens of one stream are held back for a larger message. `on_due` is called
    when their maximum delay has passed."""

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
        """True if there are events to send now."""
        return self._is_all_due or len(self._send_at) < len(self._num_held)

    def add(self, event: StreamEvent) -> None:
        """Add an event. The first token of an output, or an event other than tokens, makes all
        events due."""
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
        """Make all events due that were added so far."""
        self._is_all_due = True

    def stop(self) -> None:
        """Hold back nothing from now on, because the stream has ended."""
        self._is_all_due = self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def schedule(self) -> bool:
        """Set the timer for the events that are held back, and return True if other events are due
        now. Call this after a batch of events."""
        if self._is_all_due:
            return True
        if self._timer is None and self._send_at:
            self._timer = self._timers.call_at(min(self._send_at.values()), self._on_timer)
        return self.is_due

    def split(self, events: list[StreamEvent]) -> tuple[list[StreamEvent], list[StreamEvent]]:
        """Return the due events and the held-back events of the backlog, both in their original
        order."""
        if self._is_all_due:
            return events, []
        if not self.is_due:
            return [], events
        due: list[StreamEvent] = []
        held: list[StreamEvent] = []
        for event in events:
            # Any other event would have made all events due.
            is_held = isinstance(event, TokensPiece) and event.output_index in self._send_at
            (held if is_held else due).append(event)
        return due, held

    def forget_due(self) -> None:
        """Record that all due events have been taken."""
        if self._is_all_due:
            self._is_all_due = self._is_stopped
            self._num_held.clear()
            self._send_at.clear()
            return
        for index in [index for index in self._num_held if index not in self._send_at]:
            del self._num_held[index]

    def _on_timer(self) -> None:
        self._timer = None
        now_s = self._timers.time()
        for index in [index for index, at_s in self._send_at.items() if at_s <= now_s]:
            del self._send_at[index]
        if self.schedule():
            self._on_due()


class TokenStream(WatchedWrite):
    """The backlog between the engine and one writer.

    `num_backlog_tokens` is the number of tokens that were appended and not taken. If `is_closed`,
    nothing more will be appended. `is_aborted` is True after `abort`. `chunks` decides which tokens
    are held back. `timers` schedules their release; by default it is the running event loop.
    """

    __slots__ = (
        "_events",
        "_failure",
        "_has_prompt",
        "_hold",
        "_on_ready",
        "_text",
        "_waiter",
        "is_aborted",
        "is_closed",
        "num_backlog_tokens",
    )

    def __init__(self, chunks: ChunkLimits = NO_CHUNK_LIMITS, timers: Timers | None = None) -> None:
        super().__init__()
        self._events: list[StreamEvent] = []
        # The whole backlog, if it is the text of one token of output 0; see `push_text`.
        self._text: str | None = None
        self._has_prompt = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._failure: Failure | None = None
        self.is_closed = False
        self._hold: ChunkHold | None = None
        if chunks.is_holding:
            self._hold = ChunkHold(chunks, timers or asyncio.get_running_loop(), self.wake)
        self.is_aborted = False
        self.num_backlog_tokens = 0

    @property
    def is_drained(self) -> bool:
        """True if all events have been taken and no more will be appended."""
        return self.is_closed and not self.has_backlog

    @property
    def has_backlog(self) -> bool:
        """True if there are events that were not taken."""
        return bool(self._events) or self._text is not None

    @property
    def failure(self) -> Failure | None:
        """The error with which the stream failed; None if it has not failed."""
        return self._failure

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Make `wake` call `on_ready` instead of waking `take`, for a stream that shares its writer
        with other streams.

        `on_ready` is not called for events that are in the backlog already.
        """
        self._on_ready = on_ready

    def push(self, event: StreamEvent) -> None:
        """Append an event. Ignored if the stream is closed. Does not wake the writer; see
        `wake`."""
        if isinstance(event, TokensPiece):
            self.push_tokens(event)
        elif not self.is_closed:
            self._keep_text()
            self._events.append(event)
            self._has_prompt = self._has_prompt or isinstance(event, PromptPiece)
            if self._hold is not None:
                self._hold.add(event)

    def push_tokens(self, piece: TokensPiece) -> None:
        """Append tokens. Like `push`, but faster, because this is the most frequent event."""
        if self.is_closed:
            return
        self._keep_text()
        self._events.append(piece)
        self.num_backlog_tokens += piece.num_tokens
        if self._hold is not None:
            self._hold.add(piece)

    def push_text(self, text: str) -> None:
        """Append one token of output 0 that has only text, like `push`.

        This is the most frequent case. If `take_text` takes the token before the next one arrives,
        no event object is created.
        """
        if self._events or self.num_backlog_tokens or self._hold is not None or self.is_closed:
            self.push_tokens(TokensPiece(0, text, 1, ()))
            return
        self._text = text
        self.num_backlog_tokens = 1

    def take_text(self) -> str | None:
        """Take the backlog if it is the text of one token of output 0; otherwise return None."""
        text = self._text
        if text is not None:
            self._text = None
            self.num_backlog_tokens = 0
        return text

    def release_held(self) -> None:
        """Make the tokens due that are held back for a larger message."""
        if self._hold is not None:
            self._hold.release()

    def close(self) -> None:
        """End the stream. The backlog can still be taken; after it `take` returns an empty list."""
        self.is_closed = True
        if self._hold is not None:
            self._hold.stop()

    def fail(self, failure: Failure) -> None:
        """End the stream with an error. The backlog can still be taken; after it `take` raises the
        error. Does nothing if the stream is closed."""
        if not self.is_closed:
            self._failure = failure
            self.close()

    def abort(self, failure: Failure) -> None:
        """End the stream at once with an error: drop the backlog and interrupt a blocked write.

        Also works on a closed stream whose end was not taken. Only the first call has an effect. A
        task that is writing is cancelled; `was_interrupted` distinguishes this from a cancellation
        by the peer.
        """
        if self.is_aborted:
            return
        self.is_aborted = True
        self._failure = failure
        self._events.clear()
        self._text = None
        self.num_backlog_tokens = 0
        self.close()
        self.interrupt()
        self.wake()

    def wake(self) -> None:
        """Wake the writer, unless all events are held back. Call this once after a batch of
        events."""
        if self._hold is not None and not self._hold.schedule():
            return
        if self._on_ready is not None:
            self._on_ready()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[StreamEvent]:
        """Take all events that are due; wait until there is at least one.

        Returns an empty list at the end of the stream. Raises RequestError if the stream failed.
        """
        while not (events := self.take_due()):
            if self._failure is not None:
                raise RequestError(self._failure)
            if self.is_closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return events

    def take_due(self, max_tokens: int | None = None) -> list[StreamEvent]:
        """Take the events that are due now, with at most `max_tokens` tokens; the list may be
        empty.

        The first event with which the total would exceed `max_tokens` stays in the backlog, and so
        do the events after it. Returns no more than can be written in one iteration of the event
        loop; `on_ready` (see `attach`) is then called again for the others.
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
        """Return how many of the first `num_due` events are taken now. Schedules the others if the
        stream shares its writer (see `attach`)."""
        num_now = _num_per_pass(due, num_due)
        if num_now < num_due and self._on_ready is not None:
            asyncio.get_running_loop().call_soon(self.wake)
        if num_now == len(due):
            self._has_prompt = False
        return num_now

    def _keep_text(self) -> None:
        """Convert the pending token to an event, because `take_text` has not taken it."""
        if self._text is not None:
            self._events.append(TokensPiece(0, self._text, 1, ()))
            self._text = None


def num_tokens_of(events: list[StreamEvent]) -> int:
    """Return the number of output tokens in `events`."""
    return sum(event.num_tokens for event in events if isinstance(event, TokensPiece))


def _num_within(events: list[StreamEvent], max_tokens: int) -> int:
    """Return how many events, from the first on, have at most `max_tokens` output tokens in
    total."""
    num_left = max_tokens
    for position, event in enumerate(events):
        if isinstance(event, TokensPiece):
            num_left -= event.num_tokens
            if num_left < 0:
                return position
    return len(events)


def _num_per_pass(events: list[StreamEvent], num: int) -> int:
    """Return how many of the first `num` events are sent in this iteration of the event loop."""
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
