"""Fronts that break the protocol, do not read or come back: only they suffer."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.scheduler.request import FinishReason
from penstock.server.link.frames import FrontHello, Submit, encode
from support.link import (
    PATIENCE_S,
    EngineThread,
    FakeEngine,
    flood,
    front,
    hello,
    listening,
    raw_front,
    read_until_eof,
    socket_path,
    spec,
)


@pytest.fixture
def path() -> Iterator[Path]:
    with socket_path() as made:
        yield made


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with listening(path) as made:
        yield made


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(listener: socket.socket, fake: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(listener, fake)
    yield thread
    thread.close()


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<IBBH", 3, 1, 3, 0) + b"abc",
        encode(hello()),
        encode(FrontHello(front_id=1)),
        encode(Submit(specs=(spec(2, 1),))),
        encode(Submit(specs=(spec(1, 9), spec(1, 9)))),
    ],
    ids=["noise", "truncated", "engine frame", "second hello", "foreign key", "key twice"],
)
async def test_a_front_that_breaks_the_protocol_is_dropped_alone(
    engine: EngineThread, fake: FakeEngine, path: Path, bad: bytes
) -> None:
    with raw_front(path, 1) as broken:
        broken.sendall(encode(Submit(specs=(spec(1, 5),))))
        broken.sendall(bad)
        await asyncio.to_thread(read_until_eof, broken)
    assert await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE_S) == 1 << 32 | 5
    async with front(path, 2) as (port, _):
        assert port.is_up


async def test_a_front_that_comes_back_replaces_its_old_connection(
    engine: EngineThread, fake: FakeEngine, path: Path
) -> None:
    with raw_front(path, 1) as old:
        old.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        async with front(path, 1) as (port, _):
            await asyncio.to_thread(read_until_eof, old)
            assert fake.cancelled.get(timeout=PATIENCE_S) == 1 << 32 | 5
            port.submit((spec(1, 5),))
            await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)


async def test_a_front_that_leaves_too_much_unread_is_dropped(
    engine: EngineThread, fake: FakeEngine, path: Path
) -> None:
    with raw_front(path, 1) as stalled:
        stalled.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        flood(fake, engine, 4 << 20)
        assert await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE_S) == 1 << 32 | 5
        await asyncio.to_thread(read_until_eof, stalled)


async def test_a_front_that_reads_nothing_for_long_is_dropped(
    listener: socket.socket, fake: FakeEngine, path: Path
) -> None:
    now = [0.0]
    engine = EngineThread(
        listener, fake, max_output_bytes=1 << 30, max_blocked_s=10.0, clock=lambda: now[0]
    )
    with raw_front(path, 1) as stalled:
        stalled.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        flood(fake, engine, 4 << 20)
        await asyncio.to_thread(fake.told_all.wait, PATIENCE_S)
        async with front(path, 2) as (port, _):
            port.submit((spec(2, 1),))
            await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
            assert fake.cancelled.empty()
            now[0] = 11.0
            engine.hub.wake()
            key = await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE_S)
            assert key == 1 << 32 | 5
            assert port.is_up
    await asyncio.to_thread(engine.close)


async def test_a_front_that_reads_too_little_is_dropped(
    listener: socket.socket, fake: FakeEngine, path: Path
) -> None:
    """What counts is how old the oldest unread byte is, not when the last one was read."""
    now = [0.0]
    engine = EngineThread(
        listener, fake, max_output_bytes=1 << 30, max_blocked_s=10.0, clock=lambda: now[0]
    )
    with raw_front(path, 1) as trickling:
        trickling.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        flood(fake, engine, 4 << 20)
        await asyncio.to_thread(fake.told_all.wait, PATIENCE_S)
        now[0] = 6.0
        num_read = 0
        while num_read < 1 << 20:
            num_read += len(await asyncio.to_thread(trickling.recv, 1 << 16))
        assert fake.cancelled.empty()
        now[0] = 11.0
        engine.hub.wake()
        key = await asyncio.to_thread(fake.cancelled.get, timeout=PATIENCE_S)
        assert key == 1 << 32 | 5
    await asyncio.to_thread(engine.close)


async def test_a_slow_front_that_reads_again_gets_everything(
    listener: socket.socket, fake: FakeEngine, path: Path
) -> None:
    engine = EngineThread(listener, fake, max_output_bytes=1 << 30)
    with raw_front(path, 1) as slow:
        slow.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        flood(fake, engine, 4 << 20)
        num_bytes = 0
        while num_bytes < 4 << 20:
            num_bytes += len(await asyncio.to_thread(slow.recv, 1 << 20))
    await asyncio.to_thread(engine.close)
    assert set(fake.cancelled.queue) <= {1 << 32 | 5}


async def test_nobody_cancels_the_requests_of_another_front(
    engine: EngineThread, fake: FakeEngine, path: Path
) -> None:
    async with front(path, 1) as (port, _), front(path, 2) as (other, _):
        port.submit((spec(1, 5),))
        await asyncio.to_thread(fake.submitted.get, timeout=PATIENCE_S)
        other.cancel((1 << 32 | 5,), FinishReason.CANCELLED)
        assert await asyncio.wait_for(other.cancel_by_id("none"), PATIENCE_S) is None
        assert fake.cancelled.empty()
