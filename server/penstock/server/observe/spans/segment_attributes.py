"""What the child spans say: why it waited, and what the batch was like while it ran.

Pure. What did not happen has no attribute.
"""

from collections.abc import Sequence
from typing import Final

from penstock.scheduler.events import Stay, Wait
from penstock.server.observe.request_record import RequestRecord, Segment, SegmentKind
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.span_plan import AttributeValue
from penstock.server.observe.spans.status import status_name

ENGINE_LOST: Final = "engine_lost"
"""The request's engine was gone, and no other there yet."""
_WAIT_PARTS = (
    (keys.QUEUE_BLOCKS, "blocks"),
    (keys.QUEUE_SLOTS, "slots"),
    (keys.QUEUE_BUDGET, "token_budget"),
    (keys.QUEUE_FAIRNESS, "fairness"),
    (keys.QUEUE_OTHER, "other"),
)


def segment_attributes(record: RequestRecord, index: int) -> dict[str, AttributeValue]:
    """Of the segment `record.segments[index]`."""
    segment = record.segments[index]
    match segment.kind:
        case SegmentKind.QUEUE:
            return _of_queue(record, index)
        case SegmentKind.PREFILL:
            return _of_prefill(record.segments, index)
        case SegmentKind.DECODE:
            return _of_decode(segment)
        case SegmentKind.PREPARE | SegmentKind.DELIVER:
            return {}


def _of_queue(record: RequestRecord, index: int) -> dict[str, AttributeValue]:
    segments = record.segments
    attributes: dict[str, AttributeValue] = {keys.QUEUE_OUTCOME: _outcome(record, index)}
    is_first = all(s.kind is not SegmentKind.QUEUE for s in segments[:index])
    if is_first and record.num_ahead >= 0:
        attributes[keys.QUEUE_POSITION] = record.num_ahead
    wait = segments[index].wait
    if wait is not None:
        _add_wait(attributes, wait)
    elif segments[index].is_engine_lost:
        attributes[keys.QUEUE_REASON] = ENGINE_LOST
    return attributes


def _add_wait(attributes: dict[str, AttributeValue], wait: Wait) -> None:
    longest_s = 0.0
    for key, reason in _WAIT_PARTS:
        part_s: float = getattr(wait, f"{reason}_s")
        if part_s > 0:
            attributes[key] = part_s
        if part_s > longest_s:
            longest_s = part_s
            attributes[keys.QUEUE_REASON] = reason
    if wait.num_passed_by:
        attributes[keys.QUEUE_PASSED_BY] = wait.num_passed_by


def _outcome(record: RequestRecord, index: int) -> str:
    """How a wait ended: `admitted`, `deadline`, `cancelled`, `finished` or `failed`.

    Between two engines: `resubmitted` when the next one came, `engine_lost` when this one went.
    """
    after = record.segments[index + 1 : index + 2]
    if after and after[0].kind in (SegmentKind.PREFILL, SegmentKind.DECODE):
        return "admitted"
    if after and after[0].kind is SegmentKind.QUEUE:
        return ENGINE_LOST if after[0].is_engine_lost else "resubmitted"
    match status_name(record.code):
        case "DEADLINE_EXCEEDED":
            return "deadline"
        case "CANCELLED":
            return "cancelled"
        case "OK":
            return "cancelled" if "CANCELLED" in record.finish_reasons else "finished"
        case _:
            return "failed"


def _of_prefill(segments: Sequence[Segment], index: int) -> dict[str, AttributeValue]:
    segment = segments[index]
    attributes: dict[str, AttributeValue] = {keys.PREFILL_CACHED: segment.num_cached_tokens}
    stay = segment.stay
    if stay is None and index + 1 < len(segments):
        after = segments[index + 1]
        stay = after.stay if after.kind is SegmentKind.DECODE else None
    if stay is not None and stay.num_chunks:
        attributes[keys.PREFILL_CHUNKS] = stay.num_chunks
    if segment.stay is not None:
        _add_batch(attributes, segment.stay)
    return attributes


def _of_decode(segment: Segment) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {keys.DECODE_TOKENS: segment.num_tokens}
    stay = segment.stay
    if stay is not None:
        # The stay counts the steps of its prefill too.
        attributes[keys.DECODE_STEPS] = max(0, stay.num_steps - stay.num_chunks)
        _add_batch(attributes, stay)
    return attributes


def _add_batch(attributes: dict[str, AttributeValue], stay: Stay) -> None:
    if stay.max_batch_size:
        attributes[keys.BATCH_MIN] = stay.min_batch_size
        attributes[keys.BATCH_MAX] = stay.max_batch_size
