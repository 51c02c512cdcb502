import asyncio
import socket
from pathlib import Path

import pytest

from penstock.server.observe.frames import Heartbeat
from penstock.server.observe.front_receiver import FrontReceiver
from penstock.server.observe.listeners import ServiceListener
from penstock.server.processes import front_reporter
from penstock.server.processes.front_reporter import FrontReporter
from penstock.server.text.model_text import ModelText
from support.fronts import serving
from support.timeout import TEST_TIMEOUT_S


class HeartbeatRecorder(ServiceListener):
    def __init__(self) -> None:
        self._heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats.put_nowait(heartbeat)

    async def next(self) -> tuple[bool, int]:
        """Return whether the engine is up and its epoch, from the next heartbeat."""
        heartbeat = await asyncio.wait_for(self._heartbeats.get(), TEST_TIMEOUT_S)
        return heartbeat.is_engine_up, heartbeat.epoch


async def test_an_engine_that_connects_or_disconnects_is_reported_at_once(
    text: ModelText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_reporter, "_TICK_S", 3600.0)
    path = tmp_path / "observer.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    heartbeats = HeartbeatRecorder()
    receiver = FrontReceiver(heartbeats)
    await receiver.start(listener)
    reporter = FrontReporter(path, 7)
    try:
        async with serving(text, is_up=False, recorder=reporter.recorder) as front:
            await reporter.start(front.server)
            assert await heartbeats.next() == (False, 0)
            front.port.come_up(epoch=3)
            assert await heartbeats.next() == (True, 3)
            front.port.go_down()
            assert (await heartbeats.next())[0] is False
    finally:
        await reporter.close()
        await receiver.close(TEST_TIMEOUT_S)
