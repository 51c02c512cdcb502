"""Messages between the supervisor and a child process that is ready. The processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from penstock.server.ipc.control_frames import Drain, FromChild, SetLogLevel
from penstock.server.processes.child import Child
from penstock.server.processes.supervised_process import SupervisedProcess
from support.timeout import TEST_TIMEOUT_S

_CHILD = """\
import sys
import threading
from penstock.server.ipc.control_frames import Drain, SetLogLevel
from penstock.server.processes.control import ChildControl

control = ChildControl(int(sys.argv[1]))
assert control.read_launch() == b"settings"
stopped = threading.Event()
control.on_stop(stopped.set)
control.watch_supervisor(__import__("pathlib").Path({folder!r}) / "none" / "engine.sock")
control.report_ready(num=1)
control.send(Drain(timeout_s=0.5))
control.send(SetLogLevel(level="debug"))
stopped.wait()
control.send(Drain(timeout_s=control.drain_timeout_s))
{before_exit}
"""


class ProcessHarness:
    """A supervised process that records the messages of its child and the calls of its clean-up
    function.
    """

    def __init__(self, folder: Path, before_exit: str = "") -> None:
        text = _CHILD.format(folder=str(folder), before_exit=before_exit)
        (folder / "telling_child.py").write_text(text, encoding="utf-8")
        self.messages: asyncio.Queue[FromChild] = asyncio.Queue()
        self.clean_ups: list[tuple[int, bool]] = []
        self._folder = folder
        self.process = SupervisedProcess(
            "teller", self._spawn, self._clean_up, self.messages.put_nowait
        )
        self.child: Child | None = None

    async def next(self) -> FromChild:
        return await asyncio.wait_for(self.messages.get(), TEST_TIMEOUT_S)

    async def kept_alive(self) -> asyncio.Task[int]:
        keeper = asyncio.create_task(self.process.keep_alive())
        await asyncio.wait_for(self.process.is_ready.wait(), TEST_TIMEOUT_S)
        return keeper

    async def _spawn(self) -> Child:
        path = os.pathsep.join([str(self._folder), os.environ.get("PYTHONPATH", "")])
        self.child = await Child.spawn(
            "teller", "telling_child", b"settings", environment={"PYTHONPATH": path}
        )
        return self.child

    async def _clean_up(self, code: int, was_ordered: bool) -> None:
        self.clean_ups.append((code, was_ordered))


async def test_messages_are_delivered_and_a_drain_order_has_its_timeout(tmp_path: Path) -> None:
    place = ProcessHarness(tmp_path)
    keeper = asyncio.create_task(place.process.keep_alive())
    assert await place.next() == Drain(timeout_s=0.5)
    assert await place.next() == SetLogLevel(level="debug")
    assert place.process.facts == {"num": 1}
    place.process.retire(1.25)
    assert await place.next() == Drain(timeout_s=1.25)
    assert await asyncio.wait_for(keeper, TEST_TIMEOUT_S) == 0
    assert place.clean_ups == [(0, True)]


async def test_a_clean_up_receives_whether_the_exit_was_ordered(tmp_path: Path) -> None:
    place = ProcessHarness(tmp_path)
    keeper = asyncio.create_task(place.process.keep_alive())
    for _ in range(2):
        await place.next()
    assert place.child is not None
    place.child.kill()
    await place.next()  # of the one that follows
    place.process.kill()
    await asyncio.wait_for(keeper, TEST_TIMEOUT_S)
    assert place.clean_ups == [(-9, False), (-9, True)]


async def test_a_restart_is_not_a_failure_and_ends_when_the_next_child_is_ready(
    tmp_path: Path,
) -> None:
    place = ProcessHarness(tmp_path)
    keeper = await place.kept_alive()
    # More restarts than the supervisor would tolerate deaths.
    for _ in range(6):
        first = place.child
        await asyncio.wait_for(place.process.restart(TEST_TIMEOUT_S), TEST_TIMEOUT_S)
        assert place.child is not first
        assert place.process.is_ready.is_set()
    assert place.clean_ups == [(0, True)] * 6
    place.process.retire()
    assert await asyncio.wait_for(keeper, TEST_TIMEOUT_S) == 0


async def test_a_child_that_does_not_finish_for_a_restart_is_killed(tmp_path: Path) -> None:
    place = ProcessHarness(tmp_path)
    keeper = await place.kept_alive()
    assert place.child is not None
    os.kill(place.child.pid, signal.SIGSTOP)
    await asyncio.wait_for(place.process.restart(0.0), TEST_TIMEOUT_S)
    assert place.clean_ups == [(-9, True)]
    place.process.retire()
    assert await asyncio.wait_for(keeper, TEST_TIMEOUT_S) == 0


async def test_a_child_that_dies_before_it_reads_the_stop_order_did_not_fail(
    tmp_path: Path,
) -> None:
    place = ProcessHarness(tmp_path)
    keeper = await place.kept_alive()
    assert place.child is not None
    # The child receives nothing more, and dies before its death can be detected.
    os.kill(place.child.pid, signal.SIGSTOP)
    os.kill(place.child.pid, signal.SIGKILL)
    place.process.retire()
    assert await asyncio.wait_for(keeper, TEST_TIMEOUT_S) == 0


async def test_a_child_that_dies_after_it_read_the_stop_order_failed(tmp_path: Path) -> None:
    place = ProcessHarness(
        tmp_path, before_exit="import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    keeper = await place.kept_alive()
    place.process.retire()
    while await place.next() != Drain(timeout_s=None):
        pass
    assert await asyncio.wait_for(keeper, TEST_TIMEOUT_S) == -9
