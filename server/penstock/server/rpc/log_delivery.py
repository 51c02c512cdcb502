"""One call that delivers the log of a resumable request, from any of its messages on.

Owns the write loop, and why it ended: with the request, by another stream that took over, by a
reader that stalls. Leaves the request as it is: it outlives the call.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.server.front.errors import ErrorReason, Refusal, RequestError, refuse
from penstock.server.front.message_log import MessageLog
from penstock.server.front.resumable import Resumable
from penstock.server.front.resumptions import Resumptions
from penstock.server.front.watched_write import WatchedWrite

Write = Callable[[bytes], Awaitable[None]]


class LogDelivery(WatchedWrite):
    """A `LogReader` for one call. `clock` gives the engine's seconds."""

    __slots__ = ("_clock", "_refusal", "_resumable", "_waiter", "sequence")

    def __init__(self, resumable: Resumable, sequence: int, clock: Callable[[], float]) -> None:
        """`sequence`: of the first message that is wanted."""
        super().__init__()
        self.sequence = sequence
        self._resumable = resumable
        self._clock = clock
        self._waiter: asyncio.Future[None] | None = None
        self._refusal: Refusal | None = None

    def on_news(self) -> None:
        """See `LogReader`."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def dismiss(self, refusal: Refusal) -> None:
        """See `LogReader`."""
        if self._refusal is None:
            self._refusal = refusal
            self.break_off()
            self.on_news()

    async def run(self, write: Write) -> None:
        """Write until the request's stream ends, with or without its RequestError."""
        try:
            while messages := await self._next():
                for message in messages:
                    self.begin_write(self._clock())
                    await write(message)
                    self.end_write(self._clock())
                    self.sequence += 1
        except asyncio.CancelledError:
            # Either the peer left, or we broke the write off.
            if self.was_cut_off() and self._refusal is not None:
                raise RequestError(self._refusal) from None
            raise

    async def _next(self) -> tuple[bytes, ...]:
        """The messages from `sequence` on; none at the end. Raises RequestError."""
        resumable, log = self._resumable, self._resumable.log
        while True:
            if self._refusal is not None:
                raise RequestError(self._refusal)
            resumable.fill()
            if self.sequence < log.first_sequence:
                raise refuse_sequence(log)
            if messages := log.since(self.sequence):
                return messages
            if log.is_ended:
                if log.refusal is not None:
                    raise RequestError(log.refusal)
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


async def deliver(
    delivery: LogDelivery, resumable: Resumable, resumptions: Resumptions, write: Write
) -> None:
    """Make `delivery` the reader of the request until its call ends. Raises RequestError."""
    resumptions.take_over(resumable, delivery)
    try:
        await delivery.run(write)
    finally:
        resumptions.left(resumable, delivery)


def refuse_sequence(log: MessageLog) -> RequestError:
    """The error to raise for messages that are not there."""
    return refuse(
        ErrorReason.SEQUENCE_UNAVAILABLE,
        first_sequence=str(log.first_sequence),
        next_sequence=str(log.next_sequence),
    )
