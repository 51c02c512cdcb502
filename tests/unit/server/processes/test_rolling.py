"""Who belongs to the crew, whose end is a loss, and what breaks a rolling restart off."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from penstock.server.observe.config import FlightConfig
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.crew import Crew
from penstock.server.processes.engine_place import EnginePlace
from penstock.server.processes.flight_memory import FlightMemory
from penstock.server.processes.front_place import FrontPlace
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.rolling import RollingRestart
from penstock.server.processes.slot import Slot
from penstock.server.processes.surroundings import Surroundings

PATIENCE_S = 20.0


async def no_child() -> Child:
    raise OSError("no more processes")


def nowhere() -> Surroundings:
    raise OSError("no more memory")


def place() -> FrontPlace:
    """A front's place in which nothing can be started."""
    return FrontPlace(1, nowhere, orphans=Orphans(), front_ids=itertools.count(1))


async def test_one_whose_place_stays_empty_is_missed() -> None:
    crew = Crew()
    slot = Slot("front 1", no_child)
    crew.join(slot)
    await asyncio.wait_for(crew.someone_lost(), PATIENCE_S)
    assert crew.has_lost
    assert crew.has_given_up(slot)
    assert crew.ended_badly(slot)
    with pytest.raises(ChildFailed, match="no more processes"):
        crew.raise_first()


async def test_one_that_was_let_go_is_not() -> None:
    crew = Crew()
    slot = Slot("front 1", no_child)
    keeper = crew.join(slot)
    crew.let_go(slot)
    await asyncio.wait([keeper])
    assert not crew.has_lost
    assert not crew.ended_badly(slot)
    crew.raise_first()
    waiting = asyncio.create_task(crew.someone_lost())
    crew.hold(slot)
    await asyncio.wait_for(waiting, PATIENCE_S)
    crew.forget(slot)
    assert crew.slots == ()


async def test_a_front_that_cannot_be_followed_stays(caplog: pytest.LogCaptureFixture) -> None:
    crew, old = Crew(), place()
    fronts = [old]
    engine = EnginePlace(nowhere, orphans=Orphans(), flight=FlightMemory(FlightConfig()))
    rolling = RollingRestart(crew, engine, fronts, grace_s=lambda: 0.0, can_replay=True)
    with caplog.at_level(logging.ERROR):
        await asyncio.wait_for(rolling.run(), PATIENCE_S)
    assert fronts == [old]
    assert crew.slots == ()
    assert "front 1 stays" in caplog.text
    assert "no more memory" in caplog.text
