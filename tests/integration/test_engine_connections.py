"""Connections between engine and fronts over real Unix sockets: the engine runs on a thread, the
fronts on asyncio.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.ipc.frames import FrontHello, Submit, encode
from penstock.server.ipc.ports import EngineUnavailable
from support.link import (
    INFO,
    KEPT_LIMITS,
    EngineLink,
    FakeEngine,
    front,
    hello,
    listening,
    simulated_engine,
    spec,
)
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with listening(path) as made:
        yield made


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


def raw_front(path: Path, front_id: int) -> socket.socket:
    """Return the socket of a front that has completed its handshake; it reads only when the test
    does.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TEST_TIMEOUT_S)
    connection.connect(str(path))
    connection.sendall(encode(FrontHello(front_id=front_id)))
    assert connection.recv(65536)
    return connection


def read_until_eof(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 20):
            pass


def flood(fake: FakeEngine, engine: EngineLink, num_bytes: int) -> None:
    num_tokens = 4096
    for step in range(num_bytes // (12 * num_tokens) + 1):
        keys = np.full(num_tokens, 1 << 32 | 5, dtype=np.int64)
        tokens = np.zeros(num_tokens, dtype=np.int32)
        fake.updates.put(StepEvents(step=step, at_s=0.0, keys=keys, tokens=tokens))
    engine.connections.wake()


def run(listener: socket.socket, engine: Engine, epoch: int = 1, **limits: Any) -> EngineLink:
    """Start an engine on a thread. `limits`: arguments of FrontConnections."""
    limits = {"max_output_bytes": 1 << 20, "max_blocked_s": 1000.0, **limits}
    link = EngineLink(engine, hello(epoch), listener=listener, limits=limits)
    link.run()
    return link


@pytest.fixture
def engine(listener: socket.socket, fake: FakeEngine) -> Iterator[EngineLink]:
    thread = run(listener, fake)
    yield thread
    thread.close()


@pytest.fixture
def real(listener: socket.socket) -> Iterator[EngineLink]:
    thread = run(listener, simulated_engine())
    yield thread
    thread.close()


async def test_tokens_are_returned_as_without_sockets(real: EngineLink, path: Path) -> None:
    async with front(path, 3) as (port, received):
        assert (await received.hellos.get()).executor == INFO
        port.submit((spec(3, 1, max_tokens=20),))
        end = await received.until_ended(3 << 32 | 1)
        over_socket = received.tokens
    assert end.reason is FinishReason.LENGTH

    alone, tokens = simulated_engine(), list[int]()
    alone.submit((spec(3, 1, max_tokens=20),))
    while alone.has_work:
        tokens += alone.step().tokens.tolist()
    assert over_socket == {3 << 32 | 1: tokens}
    assert len(over_socket[3 << 32 | 1]) == 20


async def test_each_front_receives_only_its_own(real: EngineLink, path: Path) -> None:
    async with front(path, 1) as (port_1, received_1), front(path, 2) as (port_2, received_2):
        for counter in range(1, 9):
            port_1.submit((spec(1, counter),))
            port_2.submit((spec(2, counter),))
        for counter in range(1, 9):
            await received_1.until_ended(1 << 32 | counter)
            await received_2.until_ended(2 << 32 | counter)
    assert {key >> 32 for key in received_1.tokens | received_1.ended} == {1}
    assert {key >> 32 for key in received_2.tokens | received_2.ended} == {2}
    assert all(len(tokens) == 5 for tokens in received_2.tokens.values())


async def test_cancel_ends_a_running_request(real: EngineLink, path: Path) -> None:
    async with front(path, 1) as (port, received):
        port.submit((spec(1, 1, max_tokens=50_000),))
        await received.until_token(1 << 32 | 1)
        port.cancel((1 << 32 | 1, 1 << 32 | 77), FinishReason.STOP)
        end = await received.until_ended(1 << 32 | 1)
    assert end.reason is FinishReason.STOP


async def test_a_disconnected_front_cancels_its_requests(
    engine: EngineLink, fake: FakeEngine, path: Path
) -> None:
    async with front(path, 1) as (port, _):
        port.submit((spec(1, 1), spec(1, 2)))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
    gone = {await asyncio.to_thread(fake.cancelled.get, timeout=TEST_TIMEOUT_S) for _ in range(2)}
    assert gone == {1 << 32 | 1, 1 << 32 | 2}


async def test_the_loss_of_an_engine_is_reported_once_and_the_next_one_connected(
    listener: socket.socket, path: Path
) -> None:
    first = run(listener, FakeEngine(), epoch=1)
    async with front(path, 1) as (port, received):
        assert (await received.hellos.get()).epoch == 1
        await asyncio.to_thread(first.close)
        await asyncio.wait_for(received.lost.get(), TEST_TIMEOUT_S)
        assert not port.is_up
        with pytest.raises(EngineUnavailable):
            port.submit((spec(1, 1),))
        with pytest.raises(EngineUnavailable):
            await port.cancel_by_id("x")
        port.cancel((1,), FinishReason.CANCELLED)

        second = run(listener, FakeEngine(), epoch=2)
        assert (await asyncio.wait_for(received.hellos.get(), TEST_TIMEOUT_S)).epoch == 2
        port.submit((spec(1, 1),))
        assert received.lost.empty()
    await asyncio.to_thread(second.close)
    assert received.lost.qsize() == 1  # by its own close


def test_the_loss_of_an_engine_is_reported_once_on_uvloop(
    listener: socket.socket, path: Path
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            test_the_loss_of_an_engine_is_reported_once_and_the_next_one_connected(listener, path)
        )


async def test_a_pending_query_fails_when_the_engine_is_lost(
    listener: socket.socket, path: Path
) -> None:
    silent = threading.Event()

    class Silent(FakeEngine):
        def cancel_by_id(self, request_id: str) -> RequestState | None:
            silent.set()
            raise ConnectionAbortedError

    connections = FrontConnections(listener, Dispatcher(Silent(), hello(), kept_limits=KEPT_LIMITS))

    def die_when_asked() -> None:
        with contextlib.suppress(ConnectionAbortedError):
            while True:
                connections.poll(TEST_TIMEOUT_S)
        connections.close()

    thread = threading.Thread(target=die_when_asked)
    thread.start()
    async with front(path, 1) as (port, _):
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(port.cancel_by_id("x"), TEST_TIMEOUT_S)
        assert silent.is_set()
    thread.join(TEST_TIMEOUT_S)


def test_many_frames_at_once_do_not_block_steps(
    listener: socket.socket, path: Path, fake: FakeEngine
) -> None:
    """A poll handles frames for a limited time; the next polls handle the remaining frames of each
    front, in order.
    """
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    connections = FrontConnections(
        listener, Dispatcher(fake, hello(), kept_limits=KEPT_LIMITS), clock=clock
    )
    with contextlib.ExitStack() as stack:
        for front_id in (1, 2):
            own = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            own.connect(str(path))
            own.sendall(encode(FrontHello(front_id=front_id)))
            submits = [Submit(specs=(spec(front_id, 1 + number),)) for number in range(20)]
            own.sendall(b"".join(encode(submit) for submit in submits))
        handled: list[int] = []
        while not handled or handled[-1] < 40:
            connections.poll(TEST_TIMEOUT_S)
            handled.append(fake.submitted.qsize())
        connections.close()

    keys = [specs[0].key for specs in fake.submitted.queue]
    assert all(after - before < 10 for before, after in pairwise([0, *handled]))
    for front_id in (1, 2):
        own_keys = [key for key in keys if key >> 32 == front_id]
        assert own_keys == [front_id << 32 | 1 + number for number in range(20)]
        assert len({key >> 32 for key in keys[:16]}) == 2


# Fronts that violate the protocol, do not read or reconnect; others are unaffected.


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
async def test_only_the_front_that_breaks_the_protocol_is_disconnected(
    engine: EngineLink, fake: FakeEngine, path: Path, bad: bytes
) -> None:
    with raw_front(path, 1) as broken:
        broken.sendall(encode(Submit(specs=(spec(1, 5),))))
        broken.sendall(bad)
        await asyncio.to_thread(read_until_eof, broken)
    assert await asyncio.to_thread(fake.cancelled.get, timeout=TEST_TIMEOUT_S) == 1 << 32 | 5
    async with front(path, 2) as (port, _):
        assert port.is_up


async def test_a_front_that_reconnects_replaces_its_old_connection(
    engine: EngineLink, fake: FakeEngine, path: Path
) -> None:
    with raw_front(path, 1) as old:
        old.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
        async with front(path, 1) as (port, _):
            await asyncio.to_thread(read_until_eof, old)
            assert fake.cancelled.get(timeout=TEST_TIMEOUT_S) == 1 << 32 | 5
            port.submit((spec(1, 5),))
            await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)


async def test_a_front_with_too_many_unread_bytes_is_disconnected(
    engine: EngineLink, fake: FakeEngine, path: Path
) -> None:
    with raw_front(path, 1) as stalled:
        stalled.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
        flood(fake, engine, 4 << 20)
        assert await asyncio.to_thread(fake.cancelled.get, timeout=TEST_TIMEOUT_S) == 1 << 32 | 5
        await asyncio.to_thread(read_until_eof, stalled)


@pytest.mark.parametrize("num_read", [0, 1 << 20], ids=["nothing", "too little"])
async def test_a_front_that_reads_too_slowly_is_disconnected(
    listener: socket.socket, fake: FakeEngine, path: Path, num_read: int
) -> None:
    """The limit applies to the age of the oldest unread byte, not to the time since a read."""
    now = [0.0]
    engine = run(listener, fake, max_output_bytes=1 << 30, max_blocked_s=10.0, clock=lambda: now[0])
    with raw_front(path, 1) as trickling:
        trickling.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
        flood(fake, engine, 4 << 20)
        await asyncio.to_thread(fake.all_taken.wait, TEST_TIMEOUT_S)
        now[0] = 6.0
        while num_read > 0:
            num_read -= len(await asyncio.to_thread(trickling.recv, 1 << 16))
        async with front(path, 2) as (port, _):
            port.submit((spec(2, 1),))
            await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
            assert fake.cancelled.empty()
            now[0] = 11.0
            engine.connections.wake()
            key = await asyncio.to_thread(fake.cancelled.get, timeout=TEST_TIMEOUT_S)
            assert key == 1 << 32 | 5
            assert port.is_up
    await asyncio.to_thread(engine.close)


async def test_a_slow_front_that_reads_again_gets_everything(
    listener: socket.socket, fake: FakeEngine, path: Path
) -> None:
    engine = run(listener, fake, max_output_bytes=1 << 30)
    with raw_front(path, 1) as slow:
        slow.sendall(encode(Submit(specs=(spec(1, 5),))))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
        flood(fake, engine, 4 << 20)
        num_bytes = 0
        while num_bytes < 4 << 20:
            num_bytes += len(await asyncio.to_thread(slow.recv, 1 << 20))
    await asyncio.to_thread(engine.close)
    assert set(fake.cancelled.queue) <= {1 << 32 | 5}


async def test_no_front_cancels_the_requests_of_another(
    engine: EngineLink, fake: FakeEngine, path: Path
) -> None:
    async with front(path, 1) as (port, _), front(path, 2) as (other, _):
        port.submit((spec(1, 5),))
        await asyncio.to_thread(fake.submitted.get, timeout=TEST_TIMEOUT_S)
        other.cancel((1 << 32 | 5,), FinishReason.CANCELLED)
        assert await asyncio.wait_for(other.cancel_by_id("none"), TEST_TIMEOUT_S) is None
        assert fake.cancelled.empty()
