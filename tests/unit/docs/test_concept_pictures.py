"""The pictures of the concept pages are up to date, and agree with the scheduler."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from concept_pictures import (
    FOLDER,
    PICTURES,
    TRANSITIONS,
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
