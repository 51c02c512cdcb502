"""A front accepts no engine that is older than its last one, and no events before a hello."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np

from penstock.scheduler.events import StepEvents
from penstock.server.ipc.frames import encode
from penstock.server.ipc.unix_port import UnixEnginePort
from support.link import Recorder, hello, listening, socket_path
from support.timeout import TEST_TIMEOUT_S

KEY = 1 << 32 | 1
EVENTS = encode(
    StepEvents(
        step=1,
        at_s=0.0,
        keys=np.array([KEY], dtype=np.int64),
        tokens=np.array([7], dtype=np.int32),
    )
)


class Engines:
    """Accepts connections as successive engines behind one listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncGenerator[socket.socket]:
        """Accept the front's next connection and read its hello."""
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(self._listener), TEST_TIMEOUT_S)
        with connection:
            connection.setblocking(False)
            assert await asyncio.wait_for(loop.sock_recv(connection, 4096), TEST_TIMEOUT_S)
            yield connection

    async def emit(self, connection: socket.socket, *frames: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, b"".join(frames))

    async def until_hung_up(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TEST_TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                while await loop.sock_recv(connection, 4096):
                    pass


@contextlib.asynccontextmanager
async def fronted(path: Path) -> AsyncGenerator[tuple[Engines, Recorder]]:
    with listening(path) as listener:
        port, recorder = UnixEnginePort(path, 1), Recorder()
        await port.start(recorder)
        try:
            yield Engines(listener), recorder
        finally:
            await port.close()


async def test_an_engine_that_resumes_after_its_successor_started_is_ignored() -> None:
    with socket_path() as path:
        async with fronted(path) as (engines, recorder):
            async with engines.connected() as second:
                await engines.emit(second, encode(hello(2)))
                assert (await asyncio.wait_for(recorder.hellos.get(), TEST_TIMEOUT_S)).epoch == 2
            await asyncio.wait_for(recorder.lost.get(), TEST_TIMEOUT_S)
            async with engines.connected() as first:
                await engines.emit(first, encode(hello(1)), EVENTS)
                await engines.until_hung_up(first)
            assert recorder.hellos.empty()
            assert recorder.events.empty()
            # No loss is reported either, because no engine was connected.
            assert recorder.lost.empty()
            async with engines.connected() as third:
                await engines.emit(third, encode(hello(3)), EVENTS)
                assert (await asyncio.wait_for(recorder.hellos.get(), TEST_TIMEOUT_S)).epoch == 3
                updates = await asyncio.wait_for(recorder.events.get(), TEST_TIMEOUT_S)
                assert updates.tokens.tolist() == [7]


async def test_a_front_may_reconnect_to_the_same_engine() -> None:
    with socket_path() as path:
        async with fronted(path) as (engines, recorder):
            for _ in range(2):
                async with engines.connected() as connection:
                    await engines.emit(connection, encode(hello(4)))
                    assert (
                        await asyncio.wait_for(recorder.hellos.get(), TEST_TIMEOUT_S)
                    ).epoch == 4


async def test_events_without_a_hello_are_ignored() -> None:
    with socket_path() as path:
        async with fronted(path) as (engines, recorder):
            async with engines.connected() as connection:
                await engines.emit(connection, EVENTS)
                await engines.until_hung_up(connection)
            assert recorder.events.empty()
