"""What one request did and when, as the segments of its record.

Owns the step from marks, each the beginning of a stretch, to segments that tile the request's life
without gap or overlap. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.scheduler.events import Stay, Wait
from penstock.server.telemetry.request_record import Segment, SegmentKind

_RUNNING = (SegmentKind.PREFILL, SegmentKind.DECODE)


@dataclass(slots=True, eq=False)
class Mark:
    """The beginning of a stretch, which the next one ends; then what is known of it.

    `num_tokens_by_then`: of output, at the end of a stretch that ended by a preemption; -1 if it
    did not.
    """

    kind: SegmentKind
    since_s: float
    wait: Wait | None = None
    stay: Stay | None = None
    num_cached_tokens: int = 0
    num_tokens_by_then: int = -1


def segments_of(marks: Sequence[Mark], *, end_s: float, num_tokens: int) -> tuple[Segment, ...]:
    """The segments from the first mark to `end_s`; `num_tokens`: of output, by then.

    Marks stand in order of time, none of them after `end_s`. A stretch of no length is left out,
    except that there is always one segment; what was known of a stay in the batch then goes to the
    part of it that is left. The first token of a stay counts to its DECODE, though computed before.
    """
    segments: list[Segment] = []
    num_counted = 0
    untils_s = [mark.since_s for mark in marks[1:]]
    untils_s.append(end_s)
    for mark, until_s in zip(marks, untils_s, strict=True):
        num_new = 0
        if mark.kind is SegmentKind.DECODE:
            num_by_then = num_tokens if mark.num_tokens_by_then < 0 else mark.num_tokens_by_then
            num_new, num_counted = num_by_then - num_counted, num_by_then
        if until_s > mark.since_s:
            segments.append(
                Segment(
                    mark.kind,
                    mark.since_s,
                    until_s,
                    mark.wait,
                    mark.stay,
                    mark.num_cached_tokens,
                    num_new,
                )
            )
        elif mark.stay is not None and segments and segments[-1].kind in _RUNNING:
            segments[-1].stay = mark.stay
    if not segments:
        segments.append(Segment(marks[0].kind, marks[0].since_s, end_s))
    return tuple(segments)
