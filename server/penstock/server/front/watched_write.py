"""One write at a time that a reader may block, and how to interrupt it.

Owns which task writes, since when, and the difference between an interrupted writer and a writer
whose peer disconnected: both get a CancelledError. A writer of many streams has the list of ready
streams and waits on one future: a step's events mark each stream that they touch and wake the
writer once. Does not know what is written. Single event loop; marking never blocks.
"""

import asyncio
from typing import Final, Generic, TypeVar

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Refusal, RequestError

STALL_S: Final = 0.05
"""A write that takes longer counts as waiting for its reader."""
S = TypeVar("S")


class WatchedWrite:
    """The current write.

    `blocked_since_s`: when waiting for the reader began: the start of the current write, NO_TIME
    between writes. `num_writes`: completed writes.
    """

    __slots__ = (
        "_cut_writer",
        "_num_stalls",
        "_stalled_s",
        "_writer",
        "blocked_since_s",
        "num_writes",
    )

    def __init__(self) -> None:
        self._writer: asyncio.Task[object] | None = None
        self._cut_writer: asyncio.Task[object] | None = None
        self.blocked_since_s = NO_TIME
        self.num_writes = 0
        self._stalled_s = 0.0
        self._num_stalls = 0

    def begin_write(self, now_s: float) -> None:
        """Record that the calling task starts a write, which its reader may block."""
        self.blocked_since_s = now_s
        self._writer = asyncio.current_task()

    def end_write(self, now_s: float) -> None:
        """Record that the write is complete."""
        if now_s - self.blocked_since_s > STALL_S:
            self._stalled_s += now_s - self.blocked_since_s - STALL_S
            self._num_stalls += 1
        self.num_writes += 1
        self.blocked_since_s = NO_TIME
        self._writer = None

    def stalls(self, now_s: float) -> tuple[float, int]:
        """Return the seconds by which writes exceeded STALL_S, and how many did, up to now."""
        open_s = now_s - self.blocked_since_s - STALL_S
        if open_s > 0:
            return self._stalled_s + open_s, self._num_stalls + 1
        return self._stalled_s, self._num_stalls

    def wait_for_reader(self, now_s: float) -> None:
        """Record that the reader blocks the writer by giving no credit."""
        self.blocked_since_s = now_s

    def break_off(self) -> None:
        """Interrupt the current write, if there is one."""
        if self._writer is not None:
            self._cut_writer = self._writer
            self._writer.cancel()

    def was_cut_off(self) -> bool:
        """Return whether the CancelledError just caught came from `break_off` alone.

        If so, the calling task is no longer being cancelled and may report the reason to its peer.
        """
        task = asyncio.current_task()
        if task is None or self._cut_writer is not task:
            return False
        self._cut_writer = None
        return task.uncancel() == 0


class SharedWriter(WatchedWrite, Generic[S]):
    """The writer of several sources of type S. A source marks itself once until it is taken."""

    __slots__ = ("_ready", "_refusal", "_waiter")

    def __init__(self) -> None:
        super().__init__()
        self._ready: list[S] = []
        self._waiter: asyncio.Future[None] | None = None
        self._refusal: Refusal | None = None

    @property
    def is_cut(self) -> bool:
        """True once `cut` was called."""
        return self._refusal is not None

    @property
    def refusal(self) -> Refusal | None:
        """The error that the writer was closed with; None before."""
        return self._refusal

    def mark(self, source: S) -> None:
        """Mark `source` as having something to write."""
        if not self._ready:
            # The writer waits only for the first mark.
            self.wake()
        self._ready.append(source)

    def wake(self) -> None:
        """Make the writer check for changes other than marks."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cut(self, refusal: Refusal) -> None:
        """Close the writer with `refusal`, even during a blocked write."""
        if self._refusal is None:
            self._refusal = refusal
            self.break_off()
            self.wake()

    async def take(self) -> list[S]:
        """Return the sources that were marked since the last call, in that order.

        Waits while there are none, but returns none if `wake` was called. Raises RequestError once
        closed.
        """
        if not self._ready and self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._refusal is not None:
            raise RequestError(self._refusal)
        ready, self._ready = self._ready, []
        return ready
