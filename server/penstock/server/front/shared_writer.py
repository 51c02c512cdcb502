"""One writer for many streams.

Owns the list of sources that are ready and the one future their writer waits on: a step's events
mark each source they touch and wake the writer once. Does not know gRPC, nor what a source is.

Single event loop; marking never blocks.
"""

import asyncio
from typing import Generic, TypeVar

from penstock.server.front.errors import Refusal, RequestError
from penstock.server.front.watched_write import WatchedWrite

S = TypeVar("S")


class SharedWriter(WatchedWrite, Generic[S]):
    """The writer of some sources of type S; a source marks itself once until it is taken."""

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
        """The error that the writer was closed with, if it was."""
        return self._refusal

    def mark(self, source: S) -> None:
        """`source` has something to write."""
        if not self._ready:
            # It waits for the first mark only.
            self.wake()
        self._ready.append(source)

    def wake(self) -> None:
        """Make the writer check for changes other than marks."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cut(self, refusal: Refusal) -> None:
        """Close the writer with `refusal`, also during a blocked write."""
        if self._refusal is None:
            self._refusal = refusal
            self.break_off()
            self.wake()

    async def take(self) -> list[S]:
        """The sources that were marked since the last call, in that order.

        Waits while there are none, but returns none when `wake` was called. Raises RequestError
        once closed.
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
