"""A record becomes the plan of its trace: a root named by the RPC, a child for each segment.

Owns the tree, its ids and its events; what each span says of itself is in `root_attributes` and
`segment_attributes`. Pure: the same record makes the same plan. Knows no OpenTelemetry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from penstock.server.observe.request_record import RequestRecord, SegmentKind
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.root_attributes import end_attributes
from penstock.server.observe.spans.segment_attributes import segment_attributes
from penstock.server.observe.spans.span_plan import SpanEvent, SpanPlan
from penstock.server.observe.spans.status import is_server_error

MAX_CHILDREN = 120
"""Of one trace. Requests that were preempted more often lose the middle of their story."""

_ID_MASK = (1 << 64) - 1
_ID_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: odd, so that multiples of it are all different."""

_IN_BATCH = (SegmentKind.PREFILL, SegmentKind.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What plans depend on beside the record. `model`: the one that is served."""

    model: str = ""
    has_content: bool = False
    has_next_rpc_keys: bool = False


def plan_trace(record: RequestRecord, options: PlanOptions) -> SpanPlan:
    """The whole trace of one request."""
    root_id = int.from_bytes(record.trace.span_id, "big")
    return SpanPlan(
        name=record.method,
        span_id=root_id,
        start_s=record.arrival_s,
        end_s=record.end_s,
        attributes=end_attributes(
            record,
            model=options.model,
            has_content=options.has_content,
            has_next_rpc_keys=options.has_next_rpc_keys,
        ),
        is_error=is_server_error(record.code),
        events=tuple(_events(record)),
        children=tuple(_children(record, root_id)),
    )


def _children(record: RequestRecord, root_id: int) -> Iterator[SpanPlan]:
    segments = record.segments
    for index in _kept_indices(len(segments)):
        segment = segments[index]
        yield SpanPlan(
            name=segment.kind.value,
            span_id=_child_id(root_id, index),
            start_s=segment.start_s,
            end_s=segment.end_s,
            attributes=segment_attributes(record, index),
        )


def _kept_indices(num_segments: int) -> Iterable[int]:
    if num_segments <= MAX_CHILDREN:
        return range(num_segments)
    half = MAX_CHILDREN // 2
    return (*range(half), *range(num_segments - half, num_segments))


def _child_id(root_id: int, index: int) -> int:
    """As random as the root's id, and other than it and its siblings'. 0 is no id."""
    return (root_id + (index + 1) * _ID_STEP) & _ID_MASK or (root_id - _ID_STEP) & _ID_MASK


def _events(record: RequestRecord) -> Iterator[SpanEvent]:
    """It was in the batch and is in the queue again, or had lost its engine.

    An engine that preempts tells of the stay that it ends; one that died tells nothing.
    """
    for before, after in pairwise(record.segments):
        if after.kind is not SegmentKind.QUEUE:
            continue
        if after.is_engine_lost:
            yield SpanEvent(keys.REPLAYED_EVENT, after.start_s)
        elif before.kind in _IN_BATCH:
            # The next engine may have been there at once.
            is_replay = before.stay is None and record.num_replays > 0
            name = keys.REPLAYED_EVENT if is_replay else keys.PREEMPTED_EVENT
            yield SpanEvent(name, after.start_s)
