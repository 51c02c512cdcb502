"""Lists the outputs of all live requests, for operators.

A view contains no token ids and no text. Read-only; may take milliseconds.
"""

from dataclasses import dataclass, replace

from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.state import RequestState
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputView:
    """The state of one output of a request. Times are absolute seconds on the engine's clock.

    Attributes:
        waits_for: Why it is not admitted yet; only while PENDING.
        queue_position: The number of requests ahead, only while PENDING; None if it was not
            computed (see `output_views`).
        slot: Its slot in the running batch, -1 while PENDING.
        deadline_s: The earliest deadline still open, or its time limit if earlier; infinite without
            any.
        num_prompt_tokens: Tokens of the client's prompt; replayed output counts as output.
        num_computed_tokens: Tokens whose keys and values will have been written when all launched
            steps are done.
    """

    key: int
    request_id: str
    tenant: str
    output_index: int
    state: RequestState
    priority: int
    arrival_s: float
    deadline_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    slot: int = -1
    waits_for: WaitReason | None = None
    queue_position: int | None = None
    trace_id: bytes = b""


MAX_POSITIONS = 1000
"""Maximum number of waiting requests with a queue position."""


def output_views(
    arrays: SlotArrays, running: RunningSet, queue: WaitingQueue, waits: WaitClock
) -> tuple[OutputView, ...]:
    """Return the views of the running requests, the highest class and earliest arrival first, then
    the views of the waiting requests, in queue order.

    Waiting requests without a position come last: requests after the first `MAX_POSITIONS`, outputs
    that wait for their prompt, and requests of tenants at their running limit.
    """
    first = queue.order.first(MAX_POSITIONS)
    keys = {request.spec.key for request in first}
    rest = [request for request in queue if request.spec.key not in keys]
    return (
        *(_running(arrays, one) for one in sorted(running, key=_seniority)),
        *(_waiting(waits, one, place) for place, one in enumerate(first)),
        *(_waiting(waits, one, None) for one in sorted(rest, key=_seniority)),
    )


def _seniority(request: Request) -> tuple[int, int]:
    return request.seniority


def _running(arrays: SlotArrays, request: Request) -> OutputView:
    slot = request.slot
    return replace(
        _view(request, int(arrays.num_tokens[slot])),
        num_computed_tokens=int(arrays.num_computed[slot]),
        num_blocks=int(arrays.num_blocks[slot]),
        slot=slot,
    )


def _waiting(waits: WaitClock, request: Request, position: int | None) -> OutputView:
    return replace(
        _view(request, len(request.tokens)),
        waits_for=waits.reason_of(request),
        queue_position=position,
    )


def _view(request: Request, num_tokens: int) -> OutputView:
    spec, num_prompt = request.spec, request.spec.num_original_prompt_tokens
    return OutputView(
        key=spec.key,
        request_id=spec.request_id,
        tenant=spec.tenant,
        output_index=spec.output_index,
        state=request.state,
        priority=spec.priority,
        arrival_s=spec.arrival_s,
        deadline_s=request.expiry_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_tokens - num_prompt,
        num_computed_tokens=0,
        num_blocks=0,
        num_preemptions=request.num_preemptions,
        trace_id=spec.trace_id,
    )
