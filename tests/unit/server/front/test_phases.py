"""The phases of a request determine its state, its times, and the segments of its record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.events import Residency, Wait
from penstock.scheduler.state import RequestState
from penstock.server.front.phases import DECODE, PREFILL, QUEUE, PhaseClock
from penstock.server.front.watched_write import STALL_S, WatchedWrite
from penstock.server.observe.request_record import Segment, SegmentKind


def sums(clock: PhaseClock) -> tuple[float, float, float]:
    return (
        clock.spent_s(QUEUE),
        clock.spent_s(PREFILL),
        clock.spent_s(DECODE),
    )


def states_of(clock: PhaseClock) -> RequestState:
    return clock.state


def test_phases_of_one_output() -> None:
    clock = PhaseClock(10.0)
    assert states_of(clock) == RequestState.PENDING
    assert clock.note_admitted(12.0)
    assert states_of(clock) == RequestState.PROCESSING
    clock.note_token(13.0)
    clock.note_token(14.0)
    clock.stop(18.0)
    assert sums(clock) == (2.0, 1.0, 5.0)


def test_preemption_adds_a_visit_to_queue_and_prefill() -> None:
    clock = PhaseClock(0.0)
    clock.note_admitted(1.0)
    clock.note_token(3.0)
    assert clock.note_stopped(7.0, has_more=True)
    assert clock.state is RequestState.PENDING
    assert clock.note_admitted(12.0)
    assert clock.phase is PREFILL
    clock.note_token(13.0)
    clock.stop(20.0)
    assert sums(clock) == (6.0, 3.0, 11.0)


def test_two_outputs_wait_only_together() -> None:
    clock = PhaseClock(0.0)
    assert clock.note_admitted(1.0)
    assert not clock.note_admitted(2.0)
    clock.note_token(2.5)
    assert not clock.note_stopped(3.0, has_more=True)
    assert states_of(clock) == RequestState.PROCESSING
    assert clock.note_stopped(4.0, has_more=True)
    assert states_of(clock) == RequestState.PENDING


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "leave", "token"]), st.floats(-5, 5)), max_size=30)
)
def test_phase_times_never_decrease_and_sum_to_the_total(steps: list[tuple[str, float]]) -> None:
    clock = PhaseClock(0.0)
    now_s = latest_s = 0.0
    before = sums(clock)
    for step, delta_s in steps:
        now_s += delta_s  # two clocks may disagree a little, so it may go back
        latest_s = max(latest_s, now_s)
        if step == "admit":
            clock.note_admitted(now_s)
        elif step == "leave":
            clock.note_stopped(now_s, has_more=True)
        else:
            clock.note_token(now_s)
        after = sums(clock)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    clock.stop(latest_s)
    assert abs(sum(sums(clock)) - latest_s) < 1e-6


K = SegmentKind
WAIT, RESIDENCY = Wait(slots_s=1.0), Residency(num_steps=3)


def test_segments_of_a_request_with_a_preemption() -> None:
    clock = PhaseClock(0.0)
    clock.note_submitted(1.0)
    clock.note_admitted(3.0, num_cached_tokens=16, wait=WAIT)
    clock.note_token(4.0)
    clock.add_details(residency=RESIDENCY)
    clock.note_stopped(6.0, has_more=True, num_tokens=5)
    clock.note_admitted(7.0)
    clock.note_prefix(32)
    clock.note_token(8.0)
    clock.stop(9.0)
    assert clock.segments_until(10.0, num_tokens=8) == (
        Segment(K.PREPARE, 0.0, 1.0),
        Segment(K.QUEUE, 1.0, 3.0, wait=WAIT),
        Segment(K.PREFILL, 3.0, 4.0, num_cached_tokens=16),
        Segment(K.DECODE, 4.0, 6.0, residency=RESIDENCY, num_tokens=5),
        Segment(K.QUEUE, 6.0, 7.0),
        Segment(K.PREFILL, 7.0, 8.0, num_cached_tokens=32),
        Segment(K.DECODE, 8.0, 9.0, num_tokens=3),
        Segment(K.DELIVER, 9.0, 10.0),
    )


def test_a_single_token_leaves_its_residency_to_the_prefill() -> None:
    clock = PhaseClock(0.0)
    clock.note_submitted(1.0)
    clock.note_admitted(1.0)
    clock.note_token(2.0)
    clock.add_details(residency=RESIDENCY)
    clock.stop(2.0)
    assert clock.segments_until(2.0, num_tokens=1) == (
        Segment(K.PREPARE, 0.0, 1.0),
        Segment(K.PREFILL, 1.0, 2.0, residency=RESIDENCY),
    )


def test_a_request_that_took_no_time_has_a_segment_all_the_same() -> None:
    clock = PhaseClock(5.0)
    clock.note_submitted(5.0)
    assert clock.segments_until(5.0, num_tokens=0) == (Segment(K.PREPARE, 5.0, 5.0),)


def test_events_after_the_end_are_ignored() -> None:
    clock = PhaseClock(0.0)
    clock.note_submitted(1.0)
    clock.stop(2.0)
    before = clock.segments_until(4.0, num_tokens=0)
    clock.note_admitted(3.0)
    clock.note_token(3.5)
    clock.stop(3.6)
    assert clock.segments_until(4.0, num_tokens=0) == before


def test_the_final_event_explains_the_last_wait_in_the_queue_and_no_earlier_one() -> None:
    clock = PhaseClock(0.0)
    clock.note_submitted(1.0)
    clock.note_admitted(2.0, wait=WAIT)
    clock.add_details(wait=Wait(blocks_s=9.0))
    assert clock.segments_until(3.0, num_tokens=0)[1].wait == WAIT


def test_writes_that_wait_for_their_reader_are_summed() -> None:
    write = WatchedWrite()
    for begin_s, end_s in ((0.0, STALL_S), (1.0, 1.5), (2.0, 2.001)):
        write.blocked_since_s = begin_s
        write.end_write(end_s)
    assert write.num_writes == 3
    stalled_s, num_stalls = write.stalls(3.0)
    assert num_stalls == 1
    assert abs(stalled_s - (0.5 - STALL_S)) < 1e-9
    write.blocked_since_s = 3.0
    stalled_s, num_stalls = write.stalls(4.0)
    assert num_stalls == 2, "the one under way counts"
    assert abs(stalled_s - (0.5 + 1.0 - 2 * STALL_S)) < 1e-9
