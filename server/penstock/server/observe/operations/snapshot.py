"""Snapshots of a service and its live requests, as operators see them.

Defines the values, which correspond to `penstock.v1.ServerStats` but do not use protobuf. Merges
the engine's and the fronts' views of a request: the engine has outputs (state, blocks, queue
position), a front (gRPC server process) has requests (phase, history, backlog). If only the engine
or only a front has a request, the fields from the other are empty or derived. Durations are in
seconds, None if unknown.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.scheduler.output_view import OutputView
from penstock.scheduler.state import RequestState
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.request_record import SegmentKind
from penstock.server.tenants import client_request_id

_PENDING, _PROCESSING = RequestState.PENDING.name, RequestState.PROCESSING.name
_PENDING_PHASES = frozenset({SegmentKind.PREPARE.value, SegmentKind.QUEUE.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles, in seconds, of the `num` durations measured in the last minute. They are None if
    `num` is 0."""

    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    num: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The blocks of the KV cache by state. The used, cached and free blocks add up to the total."""

    block_size_tokens: int = 0
    num_total_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """The state of the engine of one model. Rates are over the last ten seconds, totals since the
    start.

    `num_accepted` is the number of requests submitted to the engine. Cancelled requests are also
    counted in `num_completed`.
    """

    model: str
    is_up: bool
    epoch: int = 0
    num_pending: int = 0
    num_processing: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    cache: CacheSnapshot = CacheSnapshot()
    num_accepted: int = 0
    num_rejected: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    mean_step_s: float | None = None
    estimated_queue_s: float | None = None
    num_engine_restarts: int = 0
    ttft: Percentiles = Percentiles()
    itl: Percentiles = Percentiles()
    queue: Percentiles = Percentiles()
    total: Percentiles = Percentiles()
    waits_for: str = ""
    """The reason why the first queued request waits: a name of `WaitReason`; empty if the queue is
    empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSnapshot:
    """The state of one front process, from its last heartbeat. `index` is its front id."""

    index: int
    pid: int
    num_streams: int
    num_live: int
    num_backlog_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the service at `time_s`, in seconds since 1970."""

    time_s: float
    uptime_s: float
    is_draining: bool
    models: tuple[ModelSnapshot, ...]
    fronts: tuple[FrontSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """An entry of a request's history: the phase and its start, in seconds since 1970."""

    phase: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One live request, without its content. Ages are in seconds; `arrival_s` is in seconds since
    1970.

    `state` is PENDING or PROCESSING. `waits_for` (as in `ModelSnapshot`) and `queue_position` (the
    number of requests ahead) are set only while PENDING. `time_to_deadline_s` is None without a
    deadline, or if the engine did not respond.
    """

    request_id: str
    model: str
    tenant: str
    state: str
    phase: str
    waits_for: str
    queue_position: int | None
    priority: int
    arrival_s: float
    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    num_backlog_tokens: int
    time_to_deadline_s: float | None
    trace_id: str
    history: tuple[PhaseChange, ...] = ()


def merge(
    engine: Iterable[OutputView],
    fronts: Iterable[FrontRequestView],
    *,
    model: str,
    now_s: float,
    to_unix_s: Callable[[float], float],
) -> tuple[RequestView, ...]:
    """Return all live requests in order of arrival, one entry per request for all its outputs.

    `engine` is empty if the engine is unavailable. `now_s` is on the clock of the views, and
    `to_unix_s` converts a time of that clock to seconds since 1970.
    """
    outputs = {view.key: view for view in engine}
    views: list[RequestView] = []
    for front in fronts:
        own = [outputs.pop(key) for key in front.keys if key in outputs]
        views.append(_view_of(front, own, model, now_s, to_unix_s))
    for own in _by_request(outputs.values()):
        views.append(_view_of(_front_of(own), own, model, now_s, to_unix_s))
    return tuple(sorted(views, key=arrival_order))


def arrival_order(view: RequestView) -> tuple[float, str, str]:
    """Return the sort key of live requests: arrival, tenant, id."""
    return view.arrival_s, view.tenant, view.request_id


def _view_of(
    front: FrontRequestView,
    outputs: Sequence[OutputView],
    model: str,
    now_s: float,
    to_unix_s: Callable[[float], float],
) -> RequestView:
    if outputs:
        state = _state_of(outputs)
    else:
        state = _PENDING if front.phase in _PENDING_PHASES else _PROCESSING
    waits_for, position = _wait_of(outputs) if state == _PENDING else ("", None)
    return RequestView(
        request_id=front.request_id,
        model=model,
        tenant=front.tenant,
        state=state,
        phase=front.phase,
        waits_for=waits_for,
        queue_position=position,
        priority=front.priority,
        arrival_s=to_unix_s(front.arrival_s),
        age_s=max(0.0, now_s - front.arrival_s),
        num_prompt_tokens=front.num_prompt_tokens,
        num_cached_tokens=front.num_cached_tokens,
        # The engine is ahead of the front by the events in transit.
        num_output_tokens=max(
            front.num_output_tokens, sum(view.num_output_tokens for view in outputs)
        ),
        num_computed_tokens=sum(view.num_computed_tokens for view in outputs),
        num_blocks=sum(view.num_blocks for view in outputs),
        num_preemptions=max(front.num_preemptions, sum(view.num_preemptions for view in outputs)),
        num_backlog_tokens=front.num_backlog_tokens,
        time_to_deadline_s=_time_to_deadline_s(outputs, now_s),
        trace_id=front.trace_id,
        history=tuple(
            PhaseChange(phase=phase, since_s=to_unix_s(since_s)) for phase, since_s in front.history
        ),
    )


def _front_of(outputs: Sequence[OutputView]) -> FrontRequestView:
    """Return a substitute for the front's view of a request whose front has not responded."""
    first = outputs[0]
    if _state_of(outputs) == _PENDING:
        phase = SegmentKind.QUEUE
    else:
        has_token = any(view.num_output_tokens for view in outputs)
        phase = SegmentKind.DECODE if has_token else SegmentKind.PREFILL
    return FrontRequestView(
        front_id=0,
        keys=tuple(view.key for view in outputs),
        request_id=client_request_id(first.tenant, first.request_id),
        tenant=first.tenant,
        priority=first.priority,
        trace_id=first.trace_id.hex(),
        arrival_s=first.arrival_s,
        phase=phase.value,
        history=(),
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=0,
        num_preemptions=0,
        num_backlog_tokens=0,
    )


def _by_request(outputs: Iterable[OutputView]) -> Iterable[list[OutputView]]:
    groups: defaultdict[tuple[str, str], list[OutputView]] = defaultdict(list)
    for view in outputs:
        groups[view.tenant, view.request_id].append(view)
    return groups.values()


def _state_of(outputs: Sequence[OutputView]) -> str:
    """Return PROCESSING if at least one output is running, because then the request uses blocks."""
    is_running = any(view.state is RequestState.PROCESSING for view in outputs)
    return _PROCESSING if is_running else _PENDING


def _wait_of(outputs: Sequence[OutputView]) -> tuple[str, int | None]:
    """Return the wait reason ("" if unknown) and the queue position (None if unknown) of the output
    that is closest to the front of the queue."""
    if not outputs:
        return "", None
    first = min(
        outputs,
        key=lambda view: math.inf if view.queue_position is None else view.queue_position,
    )
    return "" if first.waits_for is None else first.waits_for.name, first.queue_position


def _time_to_deadline_s(outputs: Sequence[OutputView], now_s: float) -> float | None:
    deadline_s = min((view.deadline_s for view in outputs), default=math.inf)
    return deadline_s - now_s if math.isfinite(deadline_s) else None


class OperationsError(Exception):
    """The operation is invalid or not possible now. The message is for the operator."""
