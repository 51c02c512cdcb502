"""What passes between the supervisor and a child after it is ready. Real processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from penstock.server.processes.child import Child
from penstock.server.processes.slot import Slot

PATIENCE_S = 30.0
_CHILD = """\
import sys
import threading
from penstock.server.processes.control import ChildControl

control = ChildControl(int(sys.argv[1]))
assert control.read_launch() == "settings"
stopped = threading.Event()
control.on_stop(stopped.set)
control.hold_lifeline(__import__("pathlib").Path({folder!r}) / "none" / "engine.sock")
control.report_ready(num=1)
control.tell("drain", timeout_s=0.5)
control.tell("log_level", level="debug")
stopped.wait()
control.tell("stopping", grace_s=control.ordered_grace_s)
"""


class Place:
    """One slot, what its child says, and what is cleaned up after it."""

    def __init__(self, folder: Path) -> None:
        text = _CHILD.format(folder=str(folder))
        (folder / "telling_child.py").write_text(text, encoding="utf-8")
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.clean_ups: list[tuple[int, bool]] = []
        self._folder = folder
        self.slot = Slot("teller", self._spawn, self._clean_up, self.messages.put_nowait)
        self.child: Child | None = None

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.messages.get(), PATIENCE_S)

    async def _spawn(self) -> Child:
        path = os.pathsep.join([str(self._folder), os.environ.get("PYTHONPATH", "")])
        self.child = await Child.spawn(
            "teller", "telling_child", "settings", environment={"PYTHONPATH": path}
        )
        return self.child

    async def _clean_up(self, code: int, was_ordered: bool) -> None:
        self.clean_ups.append((code, was_ordered))


async def test_messages_come_through_and_an_order_brings_its_grace(tmp_path: Path) -> None:
    place = Place(tmp_path)
    keeper = asyncio.create_task(place.slot.keep_alive())
    assert await place.next() == {"kind": "drain", "timeout_s": 0.5}
    assert await place.next() == {"kind": "log_level", "level": "debug"}
    assert place.slot.facts == {"num": 1}
    place.slot.retire(1.25)
    assert await asyncio.wait_for(keeper, PATIENCE_S) == 0
    assert place.clean_ups == [(0, True)]


async def test_who_cleans_up_is_told_that_nobody_ordered_the_end(tmp_path: Path) -> None:
    place = Place(tmp_path)
    keeper = asyncio.create_task(place.slot.keep_alive())
    await place.next()
    assert place.child is not None
    place.slot.forbid_restart()
    place.child.kill()
    assert await asyncio.wait_for(keeper, PATIENCE_S) == -9
    assert place.clean_ups == [(-9, False)]


async def test_the_grace_of_an_order_reaches_the_child(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.slot.forbid_restart()
    keeper = asyncio.create_task(place.slot.keep_alive())
    await place.next()
    await place.next()
    assert place.child is not None
    place.child.stop(1.25)
    assert await place.next() == {"kind": "stopping", "grace_s": 1.25}
    assert await asyncio.wait_for(keeper, PATIENCE_S) == 0
