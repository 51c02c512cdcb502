"""Which orphaned processes are ended, by which signals, and after which stop timeout. The process
table is simulated.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.server import process_table
from penstock.server.process_table import ProcessEntry
from penstock.server.processes import orphans
from penstock.server.processes.child import Child
from penstock.server.processes.orphans import Orphans


class Table:
    """The child processes of this process, which the test sets. `kills(pid, signal)`: whether the
    signal ends the process.
    """

    def __init__(self, here: int) -> None:
        self.here = here
        self.children: dict[int, ProcessEntry] = {}
        self.marked: set[int] = set()
        self.signals: list[tuple[int, signal.Signals]] = []
        self.reaped: list[int] = []
        self.has_reaped = asyncio.Event()
        self.num_looks = 0
        self.kills: Callable[[int, signal.Signals], bool] = lambda pid, number: True

    def add(self, *pids: int, has_ended: bool = False) -> None:
        for pid in pids:
            self.children[pid] = ProcessEntry(
                pid=pid,
                parent_pid=self.here,
                started_ticks=pid,
                name="worker",
                has_ended=has_ended,
            )

    def children_of(self, pid: int) -> list[ProcessEntry]:
        assert pid == self.here
        self.num_looks += 1
        return list(self.children.values())

    def send_signal(self, entry: ProcessEntry, number: signal.Signals) -> bool:
        self.signals.append((entry.pid, number))
        if self.kills(entry.pid, number):
            self.add(entry.pid, has_ended=True)
        return True

    def reap(self, pid: int) -> bool:
        assert self.children.pop(pid).has_ended
        self.reaped.append(pid)
        self.has_reaped.set()
        return True

    def was_started_with(self, pid: int, setting: str) -> bool:
        return pid in self.marked


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(os.getpid())
    for name in ("children_of", "send_signal", "reap", "was_started_with"):
        monkeypatch.setattr(process_table, name, getattr(made, name))
    monkeypatch.setattr(process_table, "entry_of", made.children.get)
    monkeypatch.setattr(process_table, "is_supported", lambda: True)
    monkeypatch.setattr(process_table, "become_subreaper", lambda: True)
    monkeypatch.setattr(orphans, "_POLL_INTERVAL_S", 0.001)
    return made


def adopting() -> Orphans:
    made = Orphans()
    made.adopt()
    return made


def spawning(pid: int, table: Table) -> Callable[[], Awaitable[Child]]:
    async def spawn() -> Child:
        table.add(pid)
        return cast(Child, SimpleNamespace(pid=pid))

    return spawn


async def test_own_children_are_kept_and_adopted_processes_are_ended(table: Table) -> None:
    harness = adopting()
    await harness.start(spawning(10, table))
    table.add(20, 21)
    table.add(22, has_ended=True)
    await harness.end_all("the engine")
    assert table.signals == [(20, signal.SIGTERM), (21, signal.SIGTERM)]
    assert sorted(table.reaped) == [20, 21, 22]
    assert list(table.children) == [10]


async def test_an_ended_child_of_this_process_is_not_reaped(table: Table) -> None:
    harness = adopting()
    await harness.start(spawning(10, table))
    table.add(10, has_ended=True)
    await harness.end_all("the engine")
    assert table.reaped == []


async def test_children_of_orphans_are_ended_too(table: Table) -> None:
    harness = adopting()

    def kills(pid: int, number: signal.Signals) -> bool:
        if pid < 25:
            table.add(pid + 1)
        return True

    table.kills = kills
    table.add(20)
    await harness.end_all("the engine")
    assert [pid for pid, _ in table.signals] == [20, 21, 22, 23, 24, 25]


async def test_a_child_that_is_being_started_is_no_orphan(table: Table) -> None:
    harness = adopting()
    is_forked, is_known = asyncio.Event(), asyncio.Event()
    spawn = spawning(10, table)

    async def slowly() -> Child:
        child = await spawn()
        is_forked.set()
        await is_known.wait()
        return child

    start = asyncio.create_task(harness.start(slowly))
    await is_forked.wait()
    num_looks = table.num_looks
    end = asyncio.create_task(harness.end_all("the engine"))
    os.kill(os.getpid(), signal.SIGCHLD)  # nor is it one when something else ends meanwhile
    for _ in range(10):
        await asyncio.sleep(0)
    assert table.num_looks == num_looks
    is_known.set()
    await asyncio.gather(start, end)
    assert table.signals == []


async def test_processes_that_ignore_sigterm_are_killed_after_the_stop_timeout(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "STOP_TIMEOUT_S", 0.02)
    harness = adopting()
    table.kills = lambda pid, number: pid == 20 or number is signal.SIGKILL
    table.add(20, 21)
    await harness.end_all("the engine")
    assert table.signals == [
        (20, signal.SIGTERM),
        (21, signal.SIGTERM),
        (21, signal.SIGKILL),
    ]


async def test_processes_that_do_not_end_are_reported_and_not_waited_for(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orphans, "STOP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(orphans, "LIMIT_S", 0.03)
    harness = adopting()
    table.kills = lambda pid, number: False
    table.add(20)
    await harness.end_all("the engine")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "processes started by the engine are still running after SIGKILL: pid=20 name=worker"
    ]


@pytest.mark.parametrize("reason", ["first of a container", "children from before"])
async def test_if_other_processes_may_be_adopted_only_marked_ones_are_ended(
    table: Table, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "first of a container":
        monkeypatch.setattr(os, "getpid", lambda: 1)
        table.here = 1
    else:
        table.add(5)
    harness = adopting()
    table.add(20, 21)
    table.add(22, has_ended=True)
    table.marked.add(21)
    await harness.end_all("the engine")
    assert table.signals == [(21, signal.SIGTERM)]
    assert sorted(table.reaped) == [21, 22]


async def test_ended_processes_are_reaped_whenever_one_ends(table: Table) -> None:
    harness = adopting()
    await harness.start(spawning(10, table))
    table.add(20, has_ended=True)
    table.add(21)
    os.kill(os.getpid(), signal.SIGCHLD)
    await table.has_reaped.wait()
    assert table.reaped == [20]
    assert table.signals == [], "an engine that runs may have helpers that cut themselves loose"


async def test_on_other_systems_no_process_is_ended(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_table, "is_supported", lambda: False)
    harness = adopting()
    table.add(20)
    await harness.start(spawning(10, table))
    await harness.end_all("the engine")
    assert (table.num_looks, table.signals) == (0, [])


async def test_a_system_without_subreapers_is_reported(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_table, "become_subreaper", lambda: False)
    harness = adopting()
    table.add(20)
    await harness.end_all("the engine")
    assert table.signals == []
    assert "no subreaper" in caplog.text
