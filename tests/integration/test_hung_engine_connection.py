from __future__ import annotations

import asyncio

import pytest

from penstock.scheduler.request import FinishReason
from penstock.server.ipc import unix_port
from penstock.server.ipc.frames import encode
from penstock.server.ipc.ports import EngineUnavailable
from support.link import front, hello, socket_path, spec
from support.timeout import TEST_TIMEOUT_S


async def test_an_engine_that_stops_reading_is_disconnected_and_cancels_do_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unix_port, "_MAX_UNSENT_BYTES", 1 << 16)

    done = asyncio.Event()

    async def hung(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(hello()))
        await writer.drain()
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        await done.wait()
        writer.transport.abort()

    with socket_path() as path:
        server = await asyncio.start_unix_server(hung, str(path))
        async with front(path, 1) as (port, received):

            def flood() -> None:
                for counter in range(1, 100_000):
                    port.submit((spec(1, counter),))

            with pytest.raises(EngineUnavailable):
                flood()
            port.cancel((1 << 32 | 1,), FinishReason.CANCELLED)
            await asyncio.wait_for(received.lost.get(), TEST_TIMEOUT_S)
        done.set()
        server.close()
        await server.wait_closed()
