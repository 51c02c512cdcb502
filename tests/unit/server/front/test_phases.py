"""The phases of a request and the time in each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.state import RequestState
from penstock.server.front.phases import DECODE, PREFILL, QUEUE, PhaseClock


def sums(clock: PhaseClock) -> tuple[float, float, float]:
    return (
        clock.spent_s(QUEUE),
        clock.spent_s(PREFILL),
        clock.spent_s(DECODE),
    )


def states_of(clock: PhaseClock) -> RequestState:
    return clock.state


def test_one_output() -> None:
    clock = PhaseClock(10.0)
    assert states_of(clock) == RequestState.PENDING
    assert clock.admit(12.0)
    assert states_of(clock) == RequestState.PROCESSING
    clock.token(13.0)
    clock.token(14.0)
    clock.stop(18.0)
    assert sums(clock) == (2.0, 1.0, 5.0)


def test_preemption_adds_a_visit_to_queue_and_prefill() -> None:
    clock = PhaseClock(0.0)
    clock.admit(1.0)
    clock.token(3.0)
    assert clock.leave(7.0, has_more=True)
    assert clock.state is RequestState.PENDING
    assert clock.admit(12.0)
    assert clock.phase is PREFILL
    clock.token(13.0)
    clock.stop(20.0)
    assert sums(clock) == (6.0, 3.0, 11.0)


def test_two_outputs_wait_only_together() -> None:
    clock = PhaseClock(0.0)
    assert clock.admit(1.0)
    assert not clock.admit(2.0)
    clock.token(2.5)
    assert not clock.leave(3.0, has_more=True)
    assert states_of(clock) == RequestState.PROCESSING
    assert clock.leave(4.0, has_more=True)
    assert states_of(clock) == RequestState.PENDING


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "leave", "token"]), st.floats(-5, 5)), max_size=30)
)
def test_sums_never_shrink_and_make_up_the_whole(steps: list[tuple[str, float]]) -> None:
    clock = PhaseClock(0.0)
    now_s = latest_s = 0.0
    before = sums(clock)
    for step, delta_s in steps:
        now_s += delta_s  # two clocks may disagree a little, so it may go back
        latest_s = max(latest_s, now_s)
        if step == "admit":
            clock.admit(now_s)
        elif step == "leave":
            clock.leave(now_s, has_more=True)
        else:
            clock.token(now_s)
        after = sums(clock)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    clock.stop(latest_s)
    assert abs(sum(sums(clock)) - latest_s) < 1e-6
