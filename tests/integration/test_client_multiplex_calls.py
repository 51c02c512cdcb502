"""The life of the Multiplex calls under both clients: lost, refused, old, drained, closed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.client import (
    CallCancelled,
    Draining,
    Event,
    MultiplexConfig,
    PoolConfig,
    StreamBroken,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from support.client_faces import (
    POLICY,
    Face,
    FakeTime,
    until_true,
)
from support.multiplex_server import (
    MultiplexServer,
    ServedRequest,
    arrived,
    failing,
    multiplex_server,
    speak_and_wait,
    until,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def server() -> AsyncIterator[MultiplexServer]:
    async with multiplex_server() as server:
        yield server


@pytest.fixture
async def face(kind: Any, server: MultiplexServer, time: FakeTime) -> AsyncIterator[Face]:
    face: Face = kind(server.address, time, multiplex=True)
    yield face
    await face.close()


async def test_a_draining_server_gets_a_new_call(face: Face, server: MultiplexServer) -> None:
    """The next connection may lead elsewhere; the old call serves what is open on it."""
    server.scripts.append(speak_and_wait)
    other = asyncio.create_task(face.events("other"))
    waiting = await arrived(server)
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"))

    assert await face.text("Hi") == ["Hello, ", "world"]

    assert len(server.calls) == 2
    assert not server.calls[0].is_half_closed.is_set()
    waiting.cancelled.set()
    assert len(await other) == 3
    await until(server.calls[0].is_half_closed)


async def test_a_lost_call_is_every_requests_failure(
    face: Face, server: MultiplexServer, time: FakeTime
) -> None:
    server.scripts.extend([speak_and_wait, accept_only])
    spoken: list[Event] = []
    with_output = asyncio.create_task(face.events("one", into=spoken))
    await arrived(server)
    without = asyncio.create_task(face.events("two"))
    await arrived(server)
    await until_true(lambda: len(spoken) == 2)

    server.cut.set()

    with pytest.raises(Unavailable, match="cut") as caught:
        await with_output
    assert caught.value.request_id == "r-1"
    events = await without
    assert [type(event) for event in events[-4:]] == [
        type(event) for event in await face.events("three")
    ]
    assert len(server.calls) == 2
    assert time.slept_s == [0.5]


async def accept_only(request: ServedRequest) -> None:
    await request.accepted()
    await request.cancelled.wait()


async def test_a_server_without_multiplex_is_named(face: Face, server: MultiplexServer) -> None:
    server.refusals.append((grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))

    with pytest.raises(Unimplemented, match="does not offer Multiplex"):
        await face.events("Hi")


async def test_a_refused_call_is_told_as_it_is(face: Face, server: MultiplexServer) -> None:
    server.refusals.append((grpc.StatusCode.UNAUTHENTICATED, "who are you"))

    with pytest.raises(Unauthenticated, match="who are you"):
        await face.events("Hi")

    assert await face.text("Hi") == ["Hello, ", "world"]


async def test_an_event_for_nobody_breaks_the_call(face: Face, server: MultiplexServer) -> None:
    async def stray(request: ServedRequest) -> None:
        request.key = 77
        await request.accepted()

    server.scripts.append(stray)

    with pytest.raises(StreamBroken, match="request 77"):
        await face.events("Hi")

    await until(server.calls[0].has_ended)


async def test_old_calls_make_way(kind: Any, server: MultiplexServer, time: FakeTime) -> None:
    face: Face = kind(server.address, time, multiplex=MultiplexConfig(max_call_age_s=100.0))
    await face.events("Hi")
    time.now_s += 99.0
    await face.events("Hi")
    assert len(server.calls) == 1
    time.now_s += 1.0

    await face.events("Hi")

    assert len(server.calls) == 2
    await until(server.calls[0].is_half_closed)
    await until(server.calls[0].has_ended)
    await face.close()


async def test_closing_ends_open_requests(face: Face, server: MultiplexServer) -> None:
    server.scripts.append(speak_and_wait)
    streaming = asyncio.create_task(face.events("Hi"))
    await arrived(server)

    await face.close()

    with pytest.raises(CallCancelled, match="closed"):
        await asyncio.wait_for(streaming, 60)
    await until(server.calls[0].has_ended)


async def test_closing_may_wait(face: Face, server: MultiplexServer) -> None:
    server.scripts.append(speak_and_wait)
    streaming = asyncio.create_task(face.events("Hi"))
    request = await arrived(server)
    closing = asyncio.create_task(face.close(grace_s=30.0))
    await until_true(lambda: face.client.pool_state.is_closed)

    request.cancelled.set()

    assert len(await asyncio.wait_for(streaming, 60)) == 3
    await asyncio.wait_for(closing, 60)
    with pytest.raises(RuntimeError, match="closed"):
        await face.events("more")


async def test_nobody_there_is_told_for_each(kind: Any, time: FakeTime) -> None:
    async with multiplex_server() as server:
        address = server.address
    face: Face = kind(address, time, multiplex=True)

    with pytest.raises(Unavailable):
        await face.events("Hi")

    assert len(time.slept_s) == POLICY.max_attempts - 1
    await face.close()


async def test_draining_everywhere_is_told(
    face: Face, server: MultiplexServer, time: FakeTime
) -> None:
    server.scripts.extend([failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 9)

    with pytest.raises(Draining):
        await face.events("Hi")

    assert len(server.calls) == POLICY.max_attempts


async def test_each_channel_has_a_call(kind: Any, server: MultiplexServer, time: FakeTime) -> None:
    face: Face = kind(server.address, time, multiplex=True, pool=PoolConfig(num_channels=2))

    for _ in range(6):
        await face.events("Hi")

    assert [len(call.requests) for call in server.calls] == [3, 3]
    assert len({call.peer for call in server.calls}) == 2
    await face.close()


async def test_a_batch_that_is_left_cancels_its_requests(
    face: Face, server: MultiplexServer
) -> None:
    server.scripts.extend([speak_and_wait] * 3)

    await face.leave_batch_after(["a", "b", "c", "d"], 6, max_concurrency=3)

    for request in server.requests:
        await until(request.cancelled)
    assert len(server.requests) == 3
    await until_true(lambda: face.client.pool_state.num_open_calls == 0)


async def test_open_requests_outlive_their_connection(kind: Any, time: FakeTime) -> None:
    """A call continues on a connection that takes no new ones; the next call gets another."""
    ageing = (("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 60_000))
    async with multiplex_server(ageing) as server:
        face: Face = kind(server.address, time, multiplex=MultiplexConfig(max_call_age_s=1.0))
        server.scripts.append(speak_and_wait)
        old = asyncio.create_task(face.events("old"))
        request = await arrived(server)

        for _ in range(500):
            time.now_s += 1.0
            await face.events("Hi")
            if server.calls[-1].peer != request.call.peer:
                break

        assert server.calls[-1].peer != request.call.peer
        assert not request.call.is_half_closed.is_set()
        request.cancelled.set()
        assert len(await old) == 3
        await until(request.call.is_half_closed)
        assert time.slept_s == []
        await face.close()
