"""Opens one request on a front and writes its stream, for any contract.

Owns the call's times, the loop that takes events and writes messages, and the distinction between a
stalled reader and a client that disconnected. Takes Penstock's message; gateway services convert
their messages first. The encoder owns the format of the written messages.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.scheduler.request import NO_TIME
from penstock.server.front import events
from penstock.server.front.accounts import RequestAccount
from penstock.server.front.errors import Refusal, RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.handlers import Context, call_timeout_s
from penstock.server.rpc.mapping_in.generation import num_lowered_priorities, read_generation
from penstock.server.rpc.parsing import num_unknown_fields
from penstock.v1 import generation_service_pb2 as pb


def begin_call(context: Context, account: RequestAccount) -> CallTimes:
    """Return the arrival time and the deadline of a call; store its timeout in `account`."""
    account.call_timeout_s = call_timeout_s(context)
    arrival_s = account.arrival_s
    deadline_s = min(arrival_s + account.call_timeout_s, NO_TIME)
    return CallTimes(arrival_s=arrival_s, call_deadline_s=deadline_s)


async def open_request(
    front: Front,
    message: pb.GenerateRequest,
    times: CallTimes,
    account: RequestAccount,
    refusal: Refusal | None = None,
) -> LiveRequest:
    """Validate the message and open its request, which the caller releases. Raises RequestError,
    also for `refusal`: the refusal found while the message was parsed.
    """
    if refusal is not None:
        raise RequestError(refusal)
    generation = read_generation(
        message,
        front.current_limits(),
        front.model_names,
        tenant=account.tenant,
        ceilings=account.ceilings,
        trace_id=account.trace.trace_id,
    )
    front.counters.num_unknown_fields += num_unknown_fields(message)
    front.counters.num_lowered_priorities += num_lowered_priorities(message, account.ceilings)
    return await front.open(generation, times, account)


class Encoder(Protocol):
    """Encodes the events of one stream, in order."""

    def encode(self, batch: Sequence[events.StreamEvent]) -> Iterable[bytes]:
        """Return the messages for these events; may be empty."""
        ...


async def deliver(front: Front, request: LiveRequest, encoder: Encoder, context: Context) -> None:
    """Write messages until the stream ends. Raises RequestError if it ends in failure."""
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
