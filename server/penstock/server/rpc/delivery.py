"""Writing the stream of one request, that has its call to itself, as messages.

Owns the loop of taking and writing, and how the end of a reader that stalls is told from that of
one that left. What the messages look like is the encoder's business.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from penstock.server.front import events
from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_account import RequestAccount
from penstock.server.rpc.call_opening import tell_trace
from penstock.server.rpc.handlers import Context


class Encoder(Protocol):
    """Makes the messages of one stream, in order."""

    def encode(self, batch: Iterable[events.StreamEvent]) -> Iterable[bytes]:
        """What is to be written of these events now; it may be nothing."""
        ...


async def deliver(
    front: Front,
    request: LiveRequest,
    encoder: Encoder,
    context: Context,
    account: RequestAccount | None,
) -> None:
    """Write until the stream ends. Raises RequestError when it ends in failure.

    `account`: of a call that has not told its trace yet.
    """
    stream, clock = request.stream, front.clock
    try:
        batch = await stream.take()
        if account is not None:
            await tell_trace(context, account)
        while batch:
            for message in encoder.encode(batch):
                stream.begin_write(clock())
                await context.write(message)
                stream.end_write(clock())
            batch = await stream.take()
    except asyncio.CancelledError:
        # Either the peer left, or its reader stalled and we cut it off in mid-write.
        if stream.was_cut_off() and stream.refusal is not None:
            raise RequestError(stream.refusal) from None
        raise
