"""The pictures of the concept pages are what the code draws, and what the scheduler does."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from concept_pictures import (
    FOLDER,
    NUM_STEPS,
    PICTURES,
    SHARES,
    STEP_BUDGET_TOKENS,
    TRANSITIONS,
    tokens_of_step,
)
from penstock.scheduler.state import TRANSITIONS as TABLE


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_current_and_whole(name: str) -> None:
    drawn = PICTURES[name]().svg()

    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn
    assert ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}title") is not None


def test_the_states_are_those_of_the_scheduler() -> None:
    drawn = {
        (source, target, event)
        for (source, target), events in TRANSITIONS.items()
        for event in events
    }

    assert drawn == {
        (state.name, target.name, event.name)
        for state, row in TABLE.items()
        for event, target in row.items()
    }


def test_no_step_is_over_its_budget_and_no_slot_is_taken_twice() -> None:
    assert max(tokens_of_step(step) for step in range(NUM_STEPS)) == STEP_BUDGET_TOKENS
    places = [
        (share.slot, share.first_step + age)
        for share in SHARES
        for age in range(len(share.prefills) + share.num_decodes)
    ]
    assert len(places) == len(set(places))
    assert max(step for _, step in places) < NUM_STEPS
