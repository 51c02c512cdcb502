"""Every cell of the state table."""

import itertools

import pytest

from penstock.scheduler.state import (
    TRANSITIONS,
    IllegalTransition,
    RequestEvent,
    RequestState,
    transition,
)

LEGAL = {
    ("PENDING", "ADMIT"): "PROCESSING",
    ("PENDING", "CANCEL"): "COMPLETED",
    ("PENDING", "FAIL"): "ERROR",
    ("PROCESSING", "PREEMPT"): "PENDING",
    ("PROCESSING", "FINISH"): "COMPLETED",
    ("PROCESSING", "CANCEL"): "COMPLETED",
    ("PROCESSING", "FAIL"): "ERROR",
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_every_cell_of_the_table(state: RequestState, event: RequestEvent) -> None:
    expected = LEGAL.get((state.name, event.name))
    if expected is None:
        with pytest.raises(IllegalTransition, match=state.name):
            transition(state, event)
    else:
        assert transition(state, event) is RequestState[expected]


def test_every_state_has_a_row_and_two_are_final() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert {state for state, row in TRANSITIONS.items() if not row} == {
        RequestState.COMPLETED,
        RequestState.ERROR,
    }
