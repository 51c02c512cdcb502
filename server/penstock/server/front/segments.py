"""What one request did and when, as the segments of its record.

Owns the step from marks, each the beginning of a stretch, to segments that tile the request's life
without gap or overlap. They are made as the values that a record is written from, because a front
makes some for every request. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.events import Stay, Wait
from penstock.server.telemetry.record_codec import SegmentValues, StayValues, WaitValues
from penstock.server.telemetry.request_record import SegmentKind

PREPARE: Final = SegmentKind.PREPARE.value
QUEUE: Final = SegmentKind.QUEUE.value
PREFILL: Final = SegmentKind.PREFILL.value
DECODE: Final = SegmentKind.DECODE.value
DELIVER: Final = SegmentKind.DELIVER.value


@dataclass(slots=True, eq=False)
class Mark:
    """The beginning of a stretch, which the next one ends; then what is known of it.

    `kind`: the value of a `SegmentKind`.
    `num_tokens_by_then`: of output, at the end of a stretch that ended by a preemption; -1 if it
    did not. `is_engine_lost`: there was no queue to wait in, because there was no engine.
    """

    kind: str
    since_s: float
    wait: Wait | None = None
    stay: Stay | None = None
    num_cached_tokens: int = 0
    num_tokens_by_then: int = -1
    is_engine_lost: bool = False


def segments_of(
    marks: Sequence[Mark], *, end_s: float, num_tokens: int
) -> tuple[SegmentValues, ...]:
    """The segments from the first mark to `end_s`; `num_tokens`: of output, by then.

    Marks stand in order of time, none of them after `end_s`. A stretch of no length is left out,
    except that there is always one segment; what was known of a stay in the batch then goes to the
    part of it that is left. The first token of a stay counts to its DECODE, though computed before.
    """
    segments: list[SegmentValues] = []
    num_counted = 0
    upcoming = iter(marks)
    next(upcoming)
    for mark in marks:
        following = next(upcoming, None)
        since_s, until_s = mark.since_s, end_s if following is None else following.since_s
        wait, stay, num_new = mark.wait, mark.stay, 0
        if mark.kind == DECODE:
            num_by_then = num_tokens if mark.num_tokens_by_then < 0 else mark.num_tokens_by_then
            num_new, num_counted = num_by_then - num_counted, num_by_then
        if until_s > since_s:
            wait_values = None if wait is None else _wait_values(wait)
            stay_values = None if stay is None else _stay_values(stay)
            segments.append(
                (
                    mark.kind,
                    since_s,
                    until_s,
                    wait_values,
                    stay_values,
                    mark.num_cached_tokens,
                    num_new,
                    mark.is_engine_lost,
                )
            )
        elif stay is not None and segments:
            segments[-1] = _with_stay(segments[-1], stay)
    return tuple(segments) or (bare_segment(marks[0].kind, marks[0].since_s, end_s),)


def bare_segment(kind: str, start_s: float, end_s: float) -> SegmentValues:
    """One of which nothing more is known."""
    return kind, start_s, end_s, None, None, 0, 0, False


def _with_stay(segment: SegmentValues, stay: Stay) -> SegmentValues:
    kind, start_s, end_s, wait, _, num_cached, num_new, is_engine_lost = segment
    if kind not in (PREFILL, DECODE):
        return segment
    told = _stay_values(stay)
    return kind, start_s, end_s, wait, told, num_cached, num_new, is_engine_lost


def _wait_values(wait: Wait) -> WaitValues:
    return (
        wait.blocks_s,
        wait.slots_s,
        wait.token_budget_s,
        wait.fairness_s,
        wait.other_s,
        wait.num_passed_by,
    )


def _stay_values(stay: Stay) -> StayValues:
    return stay.num_chunks, stay.num_steps, stay.min_batch_size, stay.max_batch_size
