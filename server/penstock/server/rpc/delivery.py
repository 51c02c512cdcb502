"""Writes the stream of one request that has its call to itself.

Owns the loop that takes events and writes messages, and distinguishes a stalled reader from a
client that disconnected. The encoder owns the form of the messages.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from penstock.server.front import events
from penstock.server.front.errors import RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.rpc.handlers import Context


class Encoder(Protocol):
    """Encodes the events of one stream, in order."""

    def encode(self, batch: Iterable[events.StreamEvent]) -> Iterable[bytes]:
        """The messages for these events; may be empty."""
        ...


async def deliver(front: Front, request: LiveRequest, encoder: Encoder, context: Context) -> None:
    """Write until the stream ends. Raises RequestError when it ends in failure."""
    stream, clock = request.stream, front.clock
    try:
        while batch := await stream.take():
            for message in encoder.encode(batch):
                stream.begin_write(clock())
                await context.write(message)
                stream.end_write(clock())
    except asyncio.CancelledError:
        # The client disconnected, or its reader stalled and the stream was closed during the write.
        if stream.was_cut_off() and stream.refusal is not None:
            raise RequestError(stream.refusal) from None
        raise
