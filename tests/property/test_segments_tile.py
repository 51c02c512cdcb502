from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import Residency, Wait
from penstock.server.front.phases import PhaseClock
from penstock.server.observe.request_record import SegmentKind

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "admit", "leave", "token", "stop", "wait", "stay", "found"]),
        # Two clocks may differ a little, and events may coincide.
        st.sampled_from([-0.5, 0.0, 0.25, 1.0]) | st.floats(-1, 5),
    ),
    max_size=40,
)


def play(clock: PhaseClock, step: str, now_s: float, num_tokens: int) -> None:
    match step:
        case "submit":
            clock.note_submitted(now_s)
        case "admit":
            clock.note_admitted(now_s, num_cached_tokens=num_tokens, wait=Wait(other_s=now_s))
        case "leave":
            clock.note_stopped(now_s, has_more=True, num_tokens=num_tokens)
        case "token":
            clock.note_token(now_s)
        case "stop":
            clock.stop(now_s)
        case "wait":
            clock.add_details(wait=Wait(slots_s=now_s))
        case "stay":
            clock.add_details(residency=Residency(num_steps=num_tokens))
        case _:
            clock.note_prefix(num_tokens)


@given(STEPS, st.floats(0, 5))
def test_segments_cover_the_lifetime_of_a_request(
    steps: list[tuple[str, float]], rest_s: float
) -> None:
    clock = PhaseClock(10.0)
    now_s, num_tokens = 10.0, 0
    for step, delta_s in steps:
        now_s += delta_s
        num_tokens += step == "token"
        play(clock, step, now_s, num_tokens)
    end_s = max(now_s, clock.segments[-1].start_s) + rest_s
    segments = clock.segments_until(end_s, num_tokens=num_tokens)
    assert segments[0].start_s == 10.0
    assert segments[-1].end_s == end_s
    assert all(one.end_s == next_.start_s for one, next_ in itertools.pairwise(segments))
    assert all(segment.end_s > segment.start_s for segment in segments) or len(segments) == 1
    assert all(segment.num_tokens >= 0 for segment in segments)
    assert sum(segment.num_tokens for segment in segments) <= num_tokens
    for segment in segments:
        assert segment.wait is None or segment.kind is SegmentKind.QUEUE
        running = (SegmentKind.PREFILL, SegmentKind.DECODE)
        assert segment.residency is None or segment.kind in running
        assert not segment.num_cached_tokens or segment.kind is SegmentKind.PREFILL
