"""The events of a request and the engine's explanations become segments of its record."""

from __future__ import annotations

from penstock.scheduler.events import Stay, Wait
from penstock.server.front.phases import PhaseClock
from penstock.server.front.watched_write import STALL_S, WatchedWrite
from penstock.server.observe.request_record import Segment, SegmentKind

K = SegmentKind
WAIT, STAY = Wait(slots_s=1.0), Stay(num_steps=3)


def test_a_life_with_a_preemption() -> None:
    clock = PhaseClock(0.0)
    clock.submit(1.0)
    clock.admit(3.0, num_cached_tokens=16, wait=WAIT)
    clock.token(4.0)
    clock.explain(stay=STAY)
    clock.leave(6.0, has_more=True, num_tokens=5)
    clock.admit(7.0)
    clock.find_prefix(32)
    clock.token(8.0)
    clock.stop(9.0)
    assert clock.segments_until(10.0, num_tokens=8) == (
        Segment(K.PREPARE, 0.0, 1.0),
        Segment(K.QUEUE, 1.0, 3.0, wait=WAIT),
        Segment(K.PREFILL, 3.0, 4.0, num_cached_tokens=16),
        Segment(K.DECODE, 4.0, 6.0, stay=STAY, num_tokens=5),
        Segment(K.QUEUE, 6.0, 7.0),
        Segment(K.PREFILL, 7.0, 8.0, num_cached_tokens=32),
        Segment(K.DECODE, 8.0, 9.0, num_tokens=3),
        Segment(K.DELIVER, 9.0, 10.0),
    )


def test_a_single_token_leaves_its_stay_to_the_prefill() -> None:
    clock = PhaseClock(0.0)
    clock.submit(1.0)
    clock.admit(1.0)
    clock.token(2.0)
    clock.explain(stay=STAY)
    clock.stop(2.0)
    assert clock.segments_until(2.0, num_tokens=1) == (
        Segment(K.PREPARE, 0.0, 1.0),
        Segment(K.PREFILL, 1.0, 2.0, stay=STAY),
    )


def test_a_request_that_took_no_time_has_a_segment_all_the_same() -> None:
    clock = PhaseClock(5.0)
    clock.submit(5.0)
    assert clock.segments_until(5.0, num_tokens=0) == (Segment(K.PREPARE, 5.0, 5.0),)


def test_what_comes_after_the_end_changes_nothing() -> None:
    clock = PhaseClock(0.0)
    clock.submit(1.0)
    clock.stop(2.0)
    before = clock.segments_until(4.0, num_tokens=0)
    clock.admit(3.0)
    clock.token(3.5)
    clock.stop(3.6)
    assert clock.segments_until(4.0, num_tokens=0) == before


def test_the_last_word_explains_the_last_stay_in_the_queue_and_no_earlier_one() -> None:
    clock = PhaseClock(0.0)
    clock.submit(1.0)
    clock.admit(2.0, wait=WAIT)
    clock.explain(wait=Wait(blocks_s=9.0))
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
