"""Both clients against a real gRPC server: deadlines, metadata, unary calls, and closing."""

import asyncio
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2

import penstock.v1 as pb
from penstock.client import (
    CallCancelled,
    ChatMessage,
    ChatMessageLike,
    Client,
    DeadlineExceeded,
    Finished,
    HealthStatus,
    ModelNotFound,
    NotFound,
    RequestState,
    SyncClient,
    Tokens,
    TraceContext,
    Unavailable,
)
from support.client_adapters import POLICY, AsyncAdapter, ClientAdapter, FakeTime
from support.scripted_server import (
    ScriptedServer,
    arrived,
    finished_message,
    send_tokens_and_wait,
    until,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_deadline_reaches_the_server(adapter: ClientAdapter, server: ScriptedServer) -> None:
    await adapter.events("Hi", deadline_s=30.0)
    await adapter.events("Hi")

    remaining_s = server.requests[0].time_remaining_s
    assert remaining_s is not None
    # The wire rounds timeouts up.
    assert 20.0 < remaining_s < 31.0
    assert server.requests[1].time_remaining_s is None


async def test_deadline_ends_the_call_on_both_sides(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)

    with pytest.raises(DeadlineExceeded):
        await adapter.events("Hi", deadline_s=4.0)

    await until(server.requests[0].cancelled)


async def test_trace_and_metadata_reach_the_server(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    trace = TraceContext(traceparent=PARENT, tracestate="vendor=1")

    await adapter.events("Hi", trace=trace, metadata=(("authorization", "Bearer t"),))

    metadata = server.requests[0].metadata
    assert metadata["traceparent"] == PARENT
    assert metadata["tracestate"] == "vendor=1"
    assert metadata["authorization"] == "Bearer t"


async def test_an_unreachable_address_is_unavailable(
    adapter: ClientAdapter, time: FakeTime
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        unreachable = type(adapter)(address, time)

        with pytest.raises(Unavailable):
            await unreachable.events("Hi")

        assert len(time.slept_s) == POLICY.max_attempts - 1
        await unreachable.close()


async def test_generate_once(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    whole = pb.GenerateOnceResponse(
        accepted=pb.RequestAccepted(request_id="r"),
        outputs=[pb.TokenDelta(output_index=0, text="all of it", num_tokens=3)],
        finished=finished_message(3),
    )
    server.once.extend([(grpc.StatusCode.UNAVAILABLE, "later"), whole])

    generation = await adapter.call("generate_once", "Hi", seed=3, deadline_s=30.0)

    assert generation.text == "all of it"
    assert generation.finished.usage.num_completion_tokens == 3
    assert server.requests[-1].request.sampling.seed == 3
    assert time.slept_s == [0.5]


async def test_chat(adapter: ClientAdapter, server: ScriptedServer) -> None:
    messages: list[ChatMessageLike] = [
        ChatMessage("system", "Be brief."),
        {"role": "user", "content": "Hi"},
    ]

    if isinstance(adapter, AsyncAdapter):
        events = [event async for event in adapter.client.chat(messages, max_tokens=4)]
    else:
        events = await asyncio.to_thread(lambda: list(adapter.client.chat(messages, max_tokens=4)))

    assert isinstance(events[-1], Finished)
    turns = [
        (turn.role, turn.parts[0].text) for turn in server.requests[0].request.chat_prompt.messages
    ]
    assert turns == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize("messages", ["Hi", [{"role": "user", "content": "Hi"}]])
async def test_a_unary_chat_response(
    adapter: ClientAdapter, server: ScriptedServer, messages: str | list[ChatMessageLike]
) -> None:
    server.once.append(
        pb.GenerateOnceResponse(
            accepted=pb.RequestAccepted(request_id="r"),
            outputs=[pb.TokenDelta(output_index=0, text="Aye.", num_tokens=1)],
            finished=finished_message(1),
        )
    )

    answer = await adapter.call("chat_once", messages, max_tokens=4)

    assert answer.text == "Aye."
    request = server.requests[-1].request
    assert request.chat_prompt.messages[0].role == "user"
    assert request.chat_prompt.messages[0].parts[0].text == "Hi"
    assert request.stopping.max_tokens == 4


async def test_cancel_by_id(adapter: ClientAdapter, server: ScriptedServer) -> None:
    state = await adapter.call("cancel", "r-5")

    assert state is RequestState.PROCESSING
    assert server.cancelled_ids == ["r-5"]


async def test_models(adapter: ClientAdapter) -> None:
    models = await adapter.call("list_models")
    model = await adapter.call("get_model")

    assert [model.name for model in models] == ["demo", "second"]
    assert model == models[0]
    with pytest.raises(ModelNotFound) as caught:
        await adapter.call("get_model", "other")
    assert caught.value.metadata == {"model": "x"}


async def test_tokens_and_text(adapter: ClientAdapter) -> None:
    plain = await adapter.call("tokenize", "Hi")
    conversation = await adapter.call("tokenize", [ChatMessage("user", "Hi")])

    assert plain.token_ids == (72, 105)
    assert conversation.rendered_text == "Hi"
    assert await adapter.call("detokenize", [72, 105]) == "Hi"
    assert await adapter.call("detokenize", []) == ""
    with pytest.raises(ValueError, match="tokenised already"):
        await adapter.call("tokenize", [1, 2])


async def test_health(adapter: ClientAdapter, server: ScriptedServer, time: FakeTime) -> None:
    assert await adapter.call("health") is HealthStatus.SERVING
    await server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await adapter.call("health") is HealthStatus.NOT_SERVING
    with pytest.raises(NotFound):
        await adapter.call("health", "no.such.Service")
    assert time.slept_s == []


async def test_wait_until_serving(adapter: ClientAdapter, server: ScriptedServer) -> None:
    await server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    waiting = asyncio.create_task(adapter.call("wait_until_serving", deadline_s=30.0))
    await server.health.set("", health_pb2.HealthCheckResponse.SERVING)

    await asyncio.wait_for(waiting, 60)


async def test_waiting_for_a_server_is_bounded(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    await server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    with pytest.raises(DeadlineExceeded):
        await adapter.call("wait_until_serving", deadline_s=0.2)


async def test_a_closed_client_raises(adapter: ClientAdapter, server: ScriptedServer) -> None:
    await adapter.close()

    with pytest.raises(RuntimeError, match="closed"):
        await adapter.events("Hi")


async def test_closing_ends_open_streams(adapter: ClientAdapter, server: ScriptedServer) -> None:
    server.scripts.append(send_tokens_and_wait)
    streaming = asyncio.create_task(adapter.events("Hi"))
    call = await arrived(server)

    await adapter.close()

    with pytest.raises(CallCancelled):
        await asyncio.wait_for(streaming, 60)
    await until(call.cancelled)


async def test_clients_close_at_the_end_of_their_block(server: ScriptedServer) -> None:
    async with Client(server.address) as client:
        assert await client.health() is HealthStatus.SERVING
    with pytest.raises(RuntimeError, match="closed"):
        await client.health()

    def use_blocking_client() -> None:
        with SyncClient(server.address) as blocking:
            assert blocking.health() is HealthStatus.SERVING
        with pytest.raises(RuntimeError, match="closed"):
            blocking.health()

    await asyncio.to_thread(use_blocking_client)


async def test_a_break_out_of_the_loop_cancels_the_request(
    server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(send_tokens_and_wait)
    adapter = AsyncAdapter(server.address, time)

    async for event in adapter.client.generate("Hi"):
        if isinstance(event, Tokens):
            break

    await until(server.requests[0].cancelled)
    await adapter.close()


async def test_cancelling_the_task_cancels_the_request(
    server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(send_tokens_and_wait)
    adapter = AsyncAdapter(server.address, time)
    streaming = asyncio.create_task(adapter.events("Hi"))
    call = await arrived(server)

    streaming.cancel()

    with pytest.raises(asyncio.CancelledError):
        await streaming
    await until(call.cancelled)
    await adapter.close()
