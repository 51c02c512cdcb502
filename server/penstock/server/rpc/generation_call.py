"""Opens one request in a gRPC server process and writes its stream, for Penstock's API and for
gateways.

Records the times of the call, takes events and writes messages in a loop, and distinguishes a
stalled reader from a client that disconnected. The input is a message of Penstock's API; gateways
convert their messages to it. The encoder defines the format of the written messages.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.scheduler.request import NO_TIME
from penstock.server.front import events
from penstock.server.front.accounts import RequestAccount
from penstock.server.front.errors import Failure, RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.handlers import Context, call_timeout_s
from penstock.server.rpc.mapping_in.generation import num_lowered_priorities, read_generation
from penstock.server.rpc.parsing import num_unknown_fields
from penstock.v1 import generation_service_pb2 as pb


def begin_call(context: Context, account: RequestAccount) -> CallTimes:
    """Return the arrival time and the deadline of a call. Also stores the timeout of the call in
    `account`, for the record of the request."""
    account.call_timeout_s = call_timeout_s(context)
    arrival_s = account.arrival_s
    deadline_s = min(arrival_s + account.call_timeout_s, NO_TIME)
    return CallTimes(arrival_s=arrival_s, call_deadline_s=deadline_s)


async def open_request(
    front: Front,
    message: pb.GenerateRequest,
    times: CallTimes,
    account: RequestAccount,
    failure: Failure | None = None,
) -> LiveRequest:
    """Validate the message and open its request. The caller must pass the request to
    `Front.release`.

    `failure` is the error found while the message was parsed; None if there was none. Counts the
    unknown fields and the lowered priorities of the message. Raises RequestError with `failure`, or
    if the request is rejected.
    """
    if failure is not None:
        raise RequestError(failure)
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
        """Return the messages for these events. The result may be empty."""
        ...


async def deliver(front: Front, request: LiveRequest, encoder: Encoder, context: Context) -> None:
    """Write the events of `request`, encoded by `encoder`, until its stream ends. Raises
    RequestError if the request fails or its reader stalls, and CancelledError or
    grpc.aio.BaseError if the client disconnects."""
    stream, clock = request.stream, front.clock
    try:
        while batch := await stream.take():
            for message in encoder.encode(batch):
                stream.begin_write(clock())
                await context.write(message)
                stream.end_write(clock())
    except asyncio.CancelledError:
        # The client has disconnected, or it stalled and the stream was closed during the write.
        if stream.was_interrupted() and stream.failure is not None:
            raise RequestError(stream.failure) from None
        raise
