"""Both clients with multiplex=True, against a Multiplex server that the test controls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.client import (
    Accepted,
    CallCancelled,
    DeadlineExceeded,
    Event,
    MultiplexConfig,
    PoolConfig,
    PromptTooLong,
    StreamBroken,
    Tokens,
    TraceContext,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from support.client_adapters import POLICY, ClientAdapter, FakeTime
from support.scripted_server import (
    ScriptedServer,
    ServedRequest,
    accept_and_send_tokens,
    arrived,
    failing,
    retry_info,
    scripted_server,
    send_tokens_and_wait,
    until,
)
from support.timeout import until_true

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def adapter(
    kind: Any, server: ScriptedServer, time: FakeTime
) -> AsyncIterator[ClientAdapter]:
    adapter: ClientAdapter = kind(server.address, time, multiplex=True)
    yield adapter
    await adapter.close()


async def test_requests_share_one_call(adapter: ClientAdapter, server: ScriptedServer) -> None:
    events = await adapter.events("Hi", max_tokens=2, request_id="mine")
    texts = await asyncio.gather(*(adapter.text(f"prompt {number}") for number in range(8)))

    assert [type(event).__name__ for event in events] == [
        "Accepted",
        "Tokens",
        "Tokens",
        "Finished",
    ]
    assert [event.sequence for event in events] == [0, 1, 2, 3]
    assert texts == [["Hello, ", "world"]] * 8
    assert len(server.calls) == 1
    assert [request.key for request in server.requests] == list(range(1, 10))
    first = server.requests[0].submit
    assert first.generation.request_id == "mine"
    assert first.generation.stopping.max_tokens == 2
    assert not first.generation.scheduling.HasField("total_timeout")


async def test_generate_once_collects_a_complete_generation(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(
        failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=accept_and_send_tokens)
    )

    generation = await adapter.call("generate_once", "Hi")

    # The caller had received no output of the first attempt, so a retry was allowed.
    assert generation.text == "Hello, world"
    assert time.slept_s == [0.5]


async def test_an_error_is_that_of_one_request(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)
    other = asyncio.create_task(adapter.events("other"))
    waiting = await arrived(server)
    server.scripts.append(
        failing(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", after=accept_and_send_tokens)
    )
    events: list[Event] = []

    with pytest.raises(PromptTooLong, match="scripted") as caught:
        await adapter.events("Hi", request_id="mine", into=events)

    assert caught.value.request_id == "mine"
    assert [type(event) for event in events] == [Accepted, Tokens]
    waiting.cancelled.set()
    assert len(await other) == 3


async def test_rejected_requests_are_retried(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(
        failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(7.5))
    )

    assert await adapter.text("Hi") == ["Hello, ", "world"]

    assert time.slept_s == [7.5]
    assert len(server.calls) == 1


async def test_leaving_early_cancels_that_request(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)

    await adapter.stop_after_output("Hi")

    await until(server.requests[0].cancelled)
    # The end event that arrives after the cancel has no request; that is no error.
    assert await adapter.text("more") == ["Hello, ", "world"]
    assert len(server.calls) == 1


async def test_credit_follows_the_reader(kind: Any, server: ScriptedServer, time: FakeTime) -> None:
    sent: list[int] = []

    async def spend(request: ServedRequest) -> None:
        await request.accepted()
        for number in range(20):
            await request.spend(2)
            sent.append(number)
            await request.tokens("x", num_tokens=2)
        await request.finished()

    server.scripts.append(spend)
    adapter: ClientAdapter = kind(server.address, time, multiplex=MultiplexConfig(window_tokens=8))
    events = await adapter.events("Hi")

    assert server.requests[0].submit.num_credit_tokens == 8
    assert sum(event.num_tokens for event in events if isinstance(event, Tokens)) == 40
    # All credit is returned, except what is in transit; never more than was used.
    assert 0 <= server.requests[0].num_credit_tokens <= 8
    await adapter.close()


async def test_chunks_fit_the_window(kind: Any, server: ScriptedServer, time: FakeTime) -> None:
    adapter: ClientAdapter = kind(server.address, time, multiplex=MultiplexConfig(window_tokens=8))

    await adapter.events("Hi", min_chunk_tokens=32)

    assert server.requests[0].submit.num_credit_tokens == 64
    await adapter.close()


async def test_the_deadline_ends_the_request_on_both_sides(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)
    events: list[Event] = []

    with pytest.raises(DeadlineExceeded) as caught:
        await adapter.events("Hi", deadline_s=4.0, into=events)

    assert caught.value.request_id == "r-1"
    assert len(events) == 2
    await until(server.requests[0].cancelled)
    assert await adapter.text("more") == ["Hello, ", "world"]


async def test_a_trace_belongs_to_its_request(kind: Any, server: ScriptedServer) -> None:
    time = FakeTime()
    adapter: ClientAdapter = kind(server.address, time, multiplex=True)

    await adapter.events("Hi", trace=TraceContext(traceparent=PARENT))
    await adapter.events("Hi")

    assert server.requests[0].submit.traceparent == PARENT
    assert not server.requests[1].submit.HasField("traceparent")
    await adapter.close()


async def test_metadata_belongs_to_the_call(adapter: ClientAdapter, server: ScriptedServer) -> None:
    with pytest.raises(ValueError, match=r"^metadata:"):
        await adapter.events("Hi", metadata=(("x", "y"),))

    assert server.requests == []


async def test_a_lost_message_fails_only_its_request(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    async def lose_one(request: ServedRequest) -> None:
        await request.accepted()
        request.next_sequence += 1
        await request.tokens("late")

    server.scripts.append(lose_one)

    with pytest.raises(StreamBroken, match="expected message 1, got 2"):
        await adapter.events("Hi")

    await until(server.requests[0].cancelled)
    assert len(server.calls) == 1


# Multiplex calls of both clients that are lost, rejected, too old, drained or closed.


async def test_a_draining_server_gets_a_new_call(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    """The next connection may reach another server; the old call continues to serve its open
    requests.
    """
    server.scripts.append(send_tokens_and_wait)
    other = asyncio.create_task(adapter.events("other"))
    waiting = await arrived(server)
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "DRAINING"))

    assert await adapter.text("Hi") == ["Hello, ", "world"]

    assert len(server.calls) == 2
    assert not server.calls[0].is_half_closed.is_set()
    waiting.cancelled.set()
    assert len(await other) == 3
    await until(server.calls[0].is_half_closed)


async def test_a_lost_call_fails_all_its_requests(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.extend([send_tokens_and_wait, accept_only])
    spoken: list[Event] = []
    with_output = asyncio.create_task(adapter.events("one", into=spoken))
    await arrived(server)
    without = asyncio.create_task(adapter.events("two"))
    await arrived(server)
    await until_true(lambda: len(spoken) == 2)

    server.cut.set()

    with pytest.raises(Unavailable, match="cut") as caught:
        await with_output
    assert caught.value.request_id == "r-1"
    events = await without
    assert [type(event) for event in events[-4:]] == [
        type(event) for event in await adapter.events("three")
    ]
    assert len(server.calls) == 2
    assert time.slept_s == [0.5]


async def accept_only(request: ServedRequest) -> None:
    await request.accepted()
    await request.cancelled.wait()


async def test_a_server_without_multiplex_is_reported(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.rejections.append((grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))

    with pytest.raises(Unimplemented, match="does not offer Multiplex"):
        await adapter.events("Hi")


async def test_a_rejected_call_has_its_own_status(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.rejections.append((grpc.StatusCode.UNAUTHENTICATED, "who are you"))

    with pytest.raises(Unauthenticated, match="who are you"):
        await adapter.events("Hi")

    assert await adapter.text("Hi") == ["Hello, ", "world"]


async def test_an_event_for_an_unknown_key_fails_the_call(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    async def stray(request: ServedRequest) -> None:
        request.key = 77
        await request.accepted()

    server.scripts.append(stray)

    with pytest.raises(StreamBroken, match="request 77"):
        await adapter.events("Hi")

    await until(server.calls[0].has_ended)


async def test_old_calls_are_replaced(kind: Any, server: ScriptedServer, time: FakeTime) -> None:
    adapter: ClientAdapter = kind(
        server.address, time, multiplex=MultiplexConfig(max_call_age_s=100.0)
    )
    await adapter.events("Hi")
    time.now_s += 99.0
    await adapter.events("Hi")
    assert len(server.calls) == 1
    time.now_s += 1.0

    await adapter.events("Hi")

    assert len(server.calls) == 2
    await until(server.calls[0].is_half_closed)
    await until(server.calls[0].has_ended)
    await adapter.close()


async def test_closing_ends_open_requests(adapter: ClientAdapter, server: ScriptedServer) -> None:
    server.scripts.append(send_tokens_and_wait)
    streaming = asyncio.create_task(adapter.events("Hi"))
    await arrived(server)

    await adapter.close()

    with pytest.raises(CallCancelled, match="closed"):
        await asyncio.wait_for(streaming, 60)
    await until(server.calls[0].has_ended)


async def test_closing_may_wait(adapter: ClientAdapter, server: ScriptedServer) -> None:
    server.scripts.append(send_tokens_and_wait)
    streaming = asyncio.create_task(adapter.events("Hi"))
    request = await arrived(server)
    closing = asyncio.create_task(adapter.close(drain_timeout_s=30.0))
    await until_true(lambda: adapter.client.pool_state.is_closed)

    request.cancelled.set()

    assert len(await asyncio.wait_for(streaming, 60)) == 3
    await asyncio.wait_for(closing, 60)
    with pytest.raises(RuntimeError, match="closed"):
        await adapter.events("more")


async def test_an_unreachable_service_is_reported_for_each_request(
    kind: Any, time: FakeTime
) -> None:
    async with scripted_server() as server:
        address = server.address
    adapter: ClientAdapter = kind(address, time, multiplex=True)

    with pytest.raises(Unavailable):
        await adapter.events("Hi")

    assert len(time.slept_s) == POLICY.max_attempts - 1
    await adapter.close()


async def test_each_channel_has_a_call(kind: Any, server: ScriptedServer, time: FakeTime) -> None:
    adapter: ClientAdapter = kind(
        server.address, time, multiplex=True, pool=PoolConfig(num_channels=2)
    )

    for _ in range(6):
        await adapter.events("Hi")

    assert [len(call.requests) for call in server.calls] == [3, 3]
    assert len({call.peer for call in server.calls}) == 2
    await adapter.close()


async def test_an_abandoned_batch_cancels_its_requests(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.extend([send_tokens_and_wait] * 3)

    await adapter.stop_batch_after(["a", "b", "c", "d"], 6, max_concurrency=3)

    for request in server.requests:
        await until(request.cancelled)
    assert len(server.requests) == 3
    await until_true(lambda: adapter.client.pool_state.num_open_calls == 0)


async def test_open_requests_outlive_their_connection(kind: Any, time: FakeTime) -> None:
    """A call continues on a connection that accepts no new calls; the next call uses another
    connection.
    """
    ageing = (("grpc.max_connection_age_ms", 50), ("grpc.max_connection_age_grace_ms", 60_000))
    async with scripted_server(options=ageing) as server:
        adapter: ClientAdapter = kind(
            server.address, time, multiplex=MultiplexConfig(max_call_age_s=1.0)
        )
        server.scripts.append(send_tokens_and_wait)
        old = asyncio.create_task(adapter.events("old"))
        request = await arrived(server)

        for _ in range(500):
            time.now_s += 1.0
            await adapter.events("Hi")
            if server.calls[-1].peer != request.call.peer:
                break

        assert server.calls[-1].peer != request.call.peer
        assert not request.call.is_half_closed.is_set()
        request.cancelled.set()
        assert len(await old) == 3
        await until(request.call.is_half_closed)
        assert time.slept_s == []
        await adapter.close()
