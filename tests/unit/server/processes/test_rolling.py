"""Which processes belong to the service, which deaths count, and rolling restarts that
are aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from penstock.server.observe.config import FlightConfig
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.engine_supervision import EngineSupervision, FlightMemory
from penstock.server.processes.front_supervision import FrontSupervision
from penstock.server.processes.orphans import Orphans
from penstock.server.processes.rolling import RollingRestart
from penstock.server.processes.service_processes import ServiceProcesses
from penstock.server.processes.spawn_context import SpawnContext
from penstock.server.processes.supervised_process import SupervisedProcess
from support.timeout import TEST_TIMEOUT_S


async def no_child() -> Child:
    raise OSError("no more processes")


def nowhere() -> SpawnContext:
    raise OSError("no more memory")


def place() -> FrontSupervision:
    """Return the supervision of a front whose process cannot be started."""
    return FrontSupervision(1, nowhere, orphans=Orphans(), front_ids=itertools.count(1))


async def test_a_process_that_is_not_replaced_counts_as_lost() -> None:
    processes = ServiceProcesses()
    process = SupervisedProcess("front 1", no_child)
    processes.add(process)
    await asyncio.wait_for(processes.any_lost(), TEST_TIMEOUT_S)
    assert processes.has_lost
    assert processes.has_given_up(process)
    assert processes.failed_to_stop(process)
    with pytest.raises(ChildFailed, match="no more processes"):
        processes.raise_first()


async def test_a_process_with_an_expected_exit_does_not_count_as_lost() -> None:
    processes = ServiceProcesses()
    process = SupervisedProcess("front 1", no_child)
    keeper = processes.add(process)
    processes.expect_exit(process)
    await asyncio.wait([keeper])
    assert not processes.has_lost
    assert not processes.failed_to_stop(process)
    processes.raise_first()
    waiting = asyncio.create_task(processes.any_lost())
    processes.require(process)
    await asyncio.wait_for(waiting, TEST_TIMEOUT_S)
    processes.remove(process)
    assert processes.all == ()


async def test_a_front_without_a_replacement_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    processes, old = ServiceProcesses(), place()
    fronts = [old]
    engine = EngineSupervision(nowhere, orphans=Orphans(), flight=FlightMemory(FlightConfig()))
    rolling = RollingRestart(
        processes, engine, fronts, drain_timeout_s=lambda: 0.0, can_replay=True
    )
    with caplog.at_level(logging.ERROR):
        await asyncio.wait_for(rolling.run(), TEST_TIMEOUT_S)
    assert fronts == [old]
    assert processes.all == ()
    assert "front slot 1 was not replaced" in caplog.text
    assert "no more memory" in caplog.text
