"""The segments of a request's record.

Converts marks, each the start of a phase, to segments without gaps or overlaps. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.scheduler.events import Stay, Wait
from penstock.server.observe.request_record import Segment, SegmentKind

PREPARE: Final = SegmentKind.PREPARE
QUEUE: Final = SegmentKind.QUEUE
PREFILL: Final = SegmentKind.PREFILL
DECODE: Final = SegmentKind.DECODE
DELIVER: Final = SegmentKind.DELIVER


@dataclass(slots=True, eq=False)
class Mark:
    """The start of a phase, which lasts until the next mark; then its details.

    `num_tokens_by_then`: of output, at the end of a phase that ended by a preemption; -1 otherwise.
    `is_engine_lost`: waiting without an engine, so in no queue.
    """

    kind: SegmentKind
    since_s: float
    wait: Wait | None = None
    stay: Stay | None = None
    num_cached_tokens: int = 0
    num_tokens_by_then: int = -1
    is_engine_lost: bool = False


def segments_of(marks: Sequence[Mark], *, end_s: float, num_tokens: int) -> tuple[Segment, ...]:
    """The segments from the first mark to `end_s`; `num_tokens`: of output, by then.

    Marks are in order of time, none of them after `end_s`. An empty phase is left out, except that
    there is always one segment; the details of a residency in the batch then go to the part of it
    that is left. The first token of a residency counts to its DECODE, though computed before.
    """
    segments: list[Segment] = []
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
            segments.append(
                Segment(
                    mark.kind,
                    since_s,
                    until_s,
                    wait,
                    stay,
                    mark.num_cached_tokens,
                    num_new,
                    mark.is_engine_lost,
                )
            )
        elif stay is not None and segments and segments[-1].kind in (PREFILL, DECODE):
            segments[-1] = msgspec.structs.replace(segments[-1], stay=stay)
    return tuple(segments) or (Segment(marks[0].kind, marks[0].since_s, end_s),)
