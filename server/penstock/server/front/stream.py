"""What has happened to one request and was not yet taken by the coroutine that writes it.

Owns one list and one future: the engine's news is appended, the writer takes everything at once.
So a write carries all that came since the last one: one token while the reader keeps up, more under
load. Does not know gRPC, nor what the events mean.

Single event loop; nothing here blocks the one who appends.
"""

import asyncio

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Refusal, RequestError
from penstock.server.front.events import StreamEvent, TokensPiece


class TokenStream:
    """The backlog between the engine and one writer.

    `num_backlog_tokens`: tokens appended and not taken. `blocked_since_s`: when the write that is
    under way began, NO_TIME between writes.
    """

    __slots__ = (
        "_cut_writer",
        "_events",
        "_is_closed",
        "_refusal",
        "_waiter",
        "_writer",
        "blocked_since_s",
        "is_cut",
        "num_backlog_tokens",
    )

    def __init__(self) -> None:
        self._events: list[StreamEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[object] | None = None
        self._cut_writer: asyncio.Task[object] | None = None
        self._refusal: Refusal | None = None
        self._is_closed = False
        self.is_cut = False
        self.num_backlog_tokens = 0
        self.blocked_since_s = NO_TIME

    @property
    def is_closed(self) -> bool:
        """True once nothing more will be appended."""
        return self._is_closed

    @property
    def refusal(self) -> Refusal | None:
        """Why the stream failed, if it did."""
        return self._refusal

    def push(self, event: StreamEvent) -> None:
        """Append; dropped once closed. Wakes nobody: see `wake`."""
        if self._is_closed:
            return
        self._events.append(event)
        if isinstance(event, TokensPiece):
            self.num_backlog_tokens += event.num_tokens

    def close(self) -> None:
        """The end: what is there will be taken, then `take` returns nothing."""
        self._is_closed = True

    def fail(self, refusal: Refusal) -> None:
        """The end in failure: what is there will be taken, then `take` raises."""
        if not self._is_closed:
            self._is_closed = True
            self._refusal = refusal

    def cut(self, refusal: Refusal) -> None:
        """Give up on the reader: drop the backlog and get the writer out of a blocked write.

        Works on a closed stream too, whose end was not taken. The writer is cancelled; it tells
        this from a cancellation by its peer with `was_cut_off`.
        """
        if self.is_cut:
            return
        self.is_cut = True
        self._is_closed = True
        self._refusal = refusal
        self._events.clear()
        self.num_backlog_tokens = 0
        if self._writer is not None:
            self._cut_writer = self._writer
            self._writer.cancel()
        self.wake()

    def wake(self) -> None:
        """Let the writer look. Call once after a batch of news."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[StreamEvent]:
        """Everything since the last call; waits while there is nothing.

        Returns an empty list at the end; raises RequestError when the stream failed.
        """
        while not self._events:
            if self._refusal is not None:
                raise RequestError(self._refusal)
            if self._is_closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        self.num_backlog_tokens = 0
        return events

    def begin_write(self, now_s: float) -> None:
        """The calling task is about to write and may be blocked by its reader."""
        self.blocked_since_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self) -> None:
        """The write went through."""
        self.blocked_since_s = NO_TIME
        self._writer = None

    def was_cut_off(self) -> bool:
        """Whether the CancelledError that the calling task has just caught came from `cut` alone.

        If so the task is no longer being cancelled and may go on to tell its peer why.
        """
        task = asyncio.current_task()
        if task is None or self._cut_writer is not task:
            return False
        self._cut_writer = None
        return task.uncancel() == 0
