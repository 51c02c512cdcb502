"""The connection pools of both clients against real gRPC servers: how they distribute calls over
connections and addresses, replace aged connections, and close.
"""

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from penstock.client import (
    NO_RETRY,
    BacklogFull,
    CallCancelled,
    ChannelConfig,
    DeadlineExceeded,
    HealthStatus,
    PoolConfig,
    RequestState,
    RetryPolicy,
    retry_service_config,
)
from penstock.client.call_settings import CallSettings
from support.client_adapters import AsyncAdapter, ClientAdapter, FakeTime
from support.scripted_server import (
    ScriptedServer,
    ServedCall,
    arrived,
    failing,
    scripted_server,
    send_tokens_and_wait,
    until,
)
from support.timeout import until_true


def speaking_until(event: asyncio.Event) -> Any:
    async def script(call: ServedCall) -> None:
        await call.accepted()
        await call.tokens("begun")
        await event.wait()
        await call.finished()

    return script


async def held(
    adapter: ClientAdapter, server: ScriptedServer
) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """Return a running call and an event; the server finishes the call once the event is set."""
    proceed = asyncio.Event()
    server.scripts.append(speaking_until(proceed))
    first = asyncio.create_task(adapter.events("first"))
    await arrived(server)
    return first, proceed


async def test_each_channel_has_a_connection(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time, pool=PoolConfig(num_channels=3))
    proceed = asyncio.Event()
    server.scripts.extend([speaking_until(proceed)] * 6)
    streams = [asyncio.create_task(adapter.events("Hi")) for _ in range(6)]
    calls = [await arrived(server) for _ in range(6)]

    peers = [call.peer for call in calls]

    assert len(set(peers)) == 3
    assert {peers.count(peer) for peer in peers} == {2}
    proceed.set()
    await asyncio.gather(*streams)
    assert adapter.client.pool_state.num_open_channels == 3
    # Connections are kept, so more calls open no new ones.
    await asyncio.gather(*(adapter.events("Hi") for _ in range(6)))
    assert {(await arrived(server)).peer for _ in range(6)} <= set(peers)
    await adapter.close()


async def test_calls_wait_for_their_turn(kind: Any, server: ScriptedServer, time: FakeTime) -> None:
    pool = PoolConfig(max_concurrent_calls=1, max_waiting_calls=1)
    adapter: ClientAdapter = kind(server.address, time, pool=pool)
    first, proceed = await held(adapter, server)
    second = asyncio.create_task(adapter.events("second"))
    await until_true(lambda: adapter.client.pool_state.num_waiting_calls == 1)

    with pytest.raises(BacklogFull):
        await adapter.events("third")
    # Other calls do not wait; otherwise no request could be cancelled.
    assert await adapter.call("cancel", "r-1") is RequestState.PROCESSING
    assert await adapter.call("health") is HealthStatus.SERVING
    assert len(server.requests) == 1

    proceed.set()
    await asyncio.gather(first, second)
    assert [call.request.text_prompt.text for call in server.requests] == ["first", "second"]
    assert adapter.client.pool_state.num_open_calls == 0
    await adapter.close()


async def test_waiting_counts_towards_the_deadline(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time, pool=PoolConfig(max_concurrent_calls=1))
    first, proceed = await held(adapter, server)

    with pytest.raises(DeadlineExceeded):
        await adapter.events("second", deadline_s=0.05)

    assert len(server.requests) == 1
    assert adapter.client.pool_state.num_waiting_calls == 0
    proceed.set()
    await first
    await adapter.events("third")
    await adapter.close()


async def test_an_address_that_never_answers_gets_no_calls(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        addresses = [server.address, f"127.0.0.1:{hole.getsockname()[1]}"]
        adapter: ClientAdapter = kind(addresses, time)
        outcomes: list[str] = []
        for _ in range(8):
            try:
                await adapter.events("Hi", deadline_s=5.0)
            except DeadlineExceeded:
                outcomes.append("silence")
            else:
                outcomes.append("served")

        assert sorted(outcomes)[:-1] == ["served"] * 7, outcomes
        assert outcomes.count("silence") == 1
        await adapter.close()


async def test_a_deadline_on_a_live_connection_does_not_replace_it(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    async def send_nothing(call: ServedCall) -> None:
        await call.cancelled.wait()

    async with scripted_server() as other:
        adapter: ClientAdapter = kind([server.address, other.address], time)
        for _ in range(2):
            await adapter.events("Hi")
        server.scripts.append(send_nothing)
        with pytest.raises(DeadlineExceeded):
            await adapter.events("Hi", deadline_s=4.0)

        for _ in range(4):
            await adapter.events("Hi")

        assert len(server.requests) == 4
        assert len(other.requests) == 3
        await adapter.close()


async def test_a_waiting_task_may_be_cancelled(server: ScriptedServer, time: FakeTime) -> None:
    adapter = AsyncAdapter(server.address, time, pool=PoolConfig(max_concurrent_calls=1))
    first, proceed = await held(adapter, server)
    second = asyncio.create_task(adapter.events("second"))
    third = asyncio.create_task(adapter.events("third"))
    await until_true(lambda: adapter.client.pool_state.num_waiting_calls == 2)

    # The slot becomes free at the moment of the cancellation, and must not be lost.
    proceed.set()
    await first
    second.cancel()

    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(await asyncio.wait_for(third, 60)) == 6
    assert adapter.client.pool_state.num_open_calls == 0
    await adapter.close()


@pytest.mark.parametrize("num_channels", [1, 2])
async def test_calls_are_spread_over_addresses(
    kind: Any, time: FakeTime, num_channels: int
) -> None:
    async with scripted_server() as one, scripted_server() as two:
        addresses = [one.address, two.address]
        adapter: ClientAdapter = kind(addresses, time, pool=PoolConfig(num_channels=num_channels))
        proceed = asyncio.Event()
        for server in (one, two):
            server.scripts.extend([speaking_until(proceed)] * 2)

        streams = [asyncio.create_task(adapter.events("Hi")) for _ in range(4)]
        for server in (one, two):
            for _ in range(2):
                await arrived(server)
        proceed.set()
        await asyncio.gather(*streams)
        await adapter.close()


async def test_a_dead_address_gets_no_calls(kind: Any, time: FakeTime) -> None:
    async with scripted_server() as dead:
        addresses = [dead.address]
    async with scripted_server() as live:
        adapter: ClientAdapter = kind(",".join([*addresses, live.address]), time)

        for _ in range(10):
            await adapter.events("Hi")

        assert len(live.requests) == 10
        assert time.slept_s == [0.5]
        await adapter.close()


async def test_one_target_of_several_servers(kind: Any, time: FakeTime) -> None:
    """gRPC's round robin serves a target that resolves to several addresses."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted_server()) for _ in range(2)]
        adapter: ClientAdapter = kind(
            "ipv4:" + ",".join(server.address for server in servers), time
        )

        # The second connection may be up a little later than the first.
        for _ in range(200):
            await adapter.events("Hi")
            if all(server.requests for server in servers):
                break

        assert all(server.requests for server in servers)
        await adapter.close()


async def test_closing_may_wait_for_open_calls(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time, pool=PoolConfig(max_concurrent_calls=1))
    first, proceed = await held(adapter, server)
    second = asyncio.create_task(adapter.events("second"))
    await until_true(lambda: adapter.client.pool_state.num_waiting_calls == 1)

    closing = asyncio.create_task(adapter.close(drain_timeout_s=30.0))

    with pytest.raises(CallCancelled, match="closed"):
        await second
    with pytest.raises(RuntimeError, match="closed"):
        await adapter.events("third")
    proceed.set()
    assert len(await first) == 3
    await asyncio.wait_for(closing, 60)
    await adapter.close()


async def test_closing_stops_waiting_at_its_time_limit(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    adapter: ClientAdapter = kind(server.address, time)
    server.scripts.append(send_tokens_and_wait)
    streaming = asyncio.create_task(adapter.events("Hi"))
    call = await arrived(server)

    await adapter.close(drain_timeout_s=0.05)

    with pytest.raises(CallCancelled):
        await streaming
    await until(call.cancelled)


async def test_aged_connections_are_replaced_without_errors(kind: Any, time: FakeTime) -> None:
    """The server ends its connections every 50 ms; open streams continue, new calls reconnect."""
    ageing = (("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 60_000))
    async with scripted_server(options=ageing) as server:
        adapter: ClientAdapter = kind(server.address, time)
        proceed = asyncio.Event()
        server.scripts.append(speaking_until(proceed))
        old = asyncio.create_task(adapter.events("old"))
        first = (await arrived(server)).peer

        peers: set[str] = set()
        for _ in range(2000):
            await adapter.events("Hi")
            peers.add((await arrived(server)).peer)
            if len(peers - {first}) >= 3:
                break

        assert len(peers - {first}) >= 3
        proceed.set()
        assert len(await old) == 3
        assert time.slept_s == [], "no call was seen to fail"
        await adapter.close()


async def test_retries_may_be_left_to_grpc(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> None:
    policy = RetryPolicy(initial_backoff_s=0.01, max_backoff_s=0.02)
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
    adapter: ClientAdapter = kind(
        server.address,
        time,
        settings=CallSettings(retry=NO_RETRY),
        channel=ChannelConfig(service_config=retry_service_config(policy)),
    )

    assert len(await adapter.events("Hi")) == 6

    assert len(server.requests) == 2
    assert time.slept_s == [], "it was not us who waited"
    await adapter.close()
