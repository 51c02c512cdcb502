"""Opens one request on a front, for any contract.

Owns the call's times, and that a refusal carries the request id. Takes our own message; gateway
services translate theirs first.
"""

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Refusal, RequestError
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_account import RequestAccount
from penstock.server.front.submission import CallTimes
from penstock.server.rpc.handlers import CallFailed, Context
from penstock.server.rpc.mapping_in.generation import (
    num_lowered_priorities,
    read_generation,
    valid_request_id,
)
from penstock.server.rpc.outcomes import call_timeout_s
from penstock.server.rpc.parsing import num_unknown_fields
from penstock.v1 import generation_service_pb2 as pb


def begin_call(context: Context, account: RequestAccount) -> CallTimes:
    """When the call of a request arrived and must end."""
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
    """Validate the message and open its request; the caller releases it. Raises CallFailed, also
    for a `refusal` while it was parsed.
    """
    if refusal is not None:
        raise _failure(message, refusal, account)
    try:
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
    except RequestError as error:
        raise _failure(message, error.refusal, account) from None


def _failure(message: pb.GenerateRequest, refusal: Refusal, account: RequestAccount) -> CallFailed:
    account.request_id = valid_request_id(message)
    return CallFailed(refusal, account.request_id)
