"""Measures how long a slow reader blocks the current write of a task, and can interrupt the write.

Records which task writes and since when. Distinguishes an interrupted writer from a writer whose
peer disconnected, because both receive a CancelledError. A writer of many streams has a list of
ready streams and waits on one future: the events of a step mark each stream that they concern, and
wake the writer once. All code runs on one event loop; marking never blocks.
"""

import asyncio
from typing import Final, Generic, TypeVar

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Failure, RequestError

STALL_S: Final = 0.05
"""A write that takes longer is counted as blocked by its reader."""
S = TypeVar("S")


class WatchedWrite:
    """Measures how long a writer is blocked by its reader, in the current write and in earlier
    writes.

    `blocked_since_s` is the start of the current write, or of the wait for flow-control credit;
    NO_TIME between writes. `num_writes` is the number of completed writes.
    """

    __slots__ = (
        "_interrupted_task",
        "_num_stalls",
        "_stalled_s",
        "_writer",
        "blocked_since_s",
        "num_writes",
    )

    def __init__(self) -> None:
        self._writer: asyncio.Task[object] | None = None
        self._interrupted_task: asyncio.Task[object] | None = None
        self.blocked_since_s = NO_TIME
        self.num_writes = 0
        self._stalled_s = 0.0
        self._num_stalls = 0

    def begin_write(self, now_s: float) -> None:
        """Record that the calling task starts a write. The reader may block this write."""
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
        """Return the total time, in seconds, by which writes exceeded STALL_S, and the number of
        these writes. The current write is included."""
        open_s = now_s - self.blocked_since_s - STALL_S
        if open_s > 0:
            return self._stalled_s + open_s, self._num_stalls + 1
        return self._stalled_s, self._num_stalls

    def wait_for_reader(self, now_s: float) -> None:
        """Record that the writer is blocked because the reader grants no flow-control credit."""
        self.blocked_since_s = now_s

    def interrupt(self) -> None:
        """Interrupt the current write, if there is one, by cancelling its task."""
        if self._writer is not None:
            self._interrupted_task = self._writer
            self._writer.cancel()

    def was_interrupted(self) -> bool:
        """Return True if the CancelledError just caught was caused only by `interrupt`.

        If so, the calling task is no longer being cancelled and may report the reason to its peer.
        """
        task = asyncio.current_task()
        if task is None or self._interrupted_task is not task:
            return False
        self._interrupted_task = None
        return task.uncancel() == 0


class SharedWriter(WatchedWrite, Generic[S]):
    """A writer shared by several sources of type S.

    A source that has data to write is queued with `mark`. The source ensures that it is queued at
    most once until the writer takes it.
    """

    __slots__ = ("_failure", "_ready", "_waiter")

    def __init__(self) -> None:
        super().__init__()
        self._ready: list[S] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Failure | None = None

    @property
    def is_aborted(self) -> bool:
        """True after `abort` was called."""
        return self._failure is not None

    @property
    def failure(self) -> Failure | None:
        """The error with which the writer was closed; None while it is open."""
        return self._failure

    def mark(self, source: S) -> None:
        """Queue `source`, because it has data to write, and wake the writer."""
        if not self._ready:
            # Only the first mark must wake the writer.
            self.wake()
        self._ready.append(source)

    def wake(self) -> None:
        """Wake the writer even if no source is marked. A waiting `take` then returns an empty
        list."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self, failure: Failure) -> None:
        """Close the writer with the error `failure`; interrupts a blocked write."""
        if self._failure is None:
            self._failure = failure
            self.interrupt()
            self.wake()

    async def take(self) -> list[S]:
        """Return the sources that were marked since the last call, in that order.

        Waits while there are none; after `wake` the list may be empty. Raises RequestError after
        `abort`.
        """
        if not self._ready and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise RequestError(self._failure)
        ready, self._ready = self._ready, []
        return ready
