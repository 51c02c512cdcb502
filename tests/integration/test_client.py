"""Streams of both clients, against a real gRPC server: their events and errors, and when the
clients retry.
"""

import grpc
import pytest

from penstock.client import (
    Accepted,
    Draining,
    EngineDown,
    Event,
    Finished,
    InvalidArgument,
    StreamBroken,
    Tokens,
)
from support.client_adapters import POLICY, ClientAdapter, FakeTime
from support.scripted_server import (
    ScriptedServer,
    ServedCall,
    accept,
    accept_and_send_tokens,
    failing,
    retry_info,
    send_tokens_and_wait,
    until,
)


async def test_a_stream_from_accepted_to_finished(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    events = await adapter.events("Hi", temperature=0.5, max_tokens=2, request_id="mine")

    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Accepted", "Progress", "Progress", "Tokens", "Tokens", "Finished"]
    assert [event.sequence for event in events] == list(range(6))
    request = server.requests[0].request
    assert request.text_prompt.text == "Hi"
    assert request.sampling.temperature == 0.5
    assert request.stopping.max_tokens == 2
    assert request.request_id == "mine"


async def test_generate_text_yields_only_text(adapter: ClientAdapter) -> None:
    assert await adapter.text("Hi") == ["Hello, ", "world"]


async def test_text_of_several_outputs_is_rejected(adapter: ClientAdapter) -> None:
    with pytest.raises(ValueError, match=r"^n:"):
        await adapter.text("Hi", n=2)


async def test_a_rejection_is_typed_and_not_retried(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(failing(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"))

    with pytest.raises(InvalidArgument) as caught:
        await adapter.events("Hi")

    assert caught.value.message == "scripted"
    assert len(server.requests) == 1
    assert time.slept_s == []


async def test_a_retry_after_accepted_starts_again(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=accept))

    events = await adapter.events("Hi")

    assert [type(event) for event in events[:2]] == [Accepted, Accepted]
    assert [event.sequence for event in events[:3]] == [0, 0, 1]
    assert isinstance(events[-1], Finished)
    assert time.slept_s == [0.5]


async def test_no_retry_after_output(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.append(
        failing(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", after=accept_and_send_tokens)
    )
    events: list[Event] = []

    with pytest.raises(EngineDown) as caught:
        await adapter.events("Hi", into=events)

    assert [type(event) for event in events] == [Accepted, Tokens]
    assert caught.value.request_id == "r-1"
    assert len(server.requests) == 1
    assert time.slept_s == []


async def test_the_number_of_attempts_is_limited(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime
) -> None:
    server.scripts.extend([failing(grpc.StatusCode.UNAVAILABLE, "DRAINING")] * 9)

    with pytest.raises(Draining):
        await adapter.events("Hi")

    assert len(server.requests) == POLICY.max_attempts
    assert time.slept_s == [0.5, 1.0]


@pytest.mark.parametrize("way", ["trailer", "detail"])
async def test_a_retry_waits_for_the_pushback(
    adapter: ClientAdapter, server: ScriptedServer, time: FakeTime, way: str
) -> None:
    details = (retry_info(7.5),) if way == "detail" else ()
    trailers = (("grpc-retry-pushback-ms", "7500"),) if way == "trailer" else ()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.scripts.append(failing(code, "QUEUE_FULL", *details, trailers=trailers))

    await adapter.events("Hi")

    assert time.slept_s == [7.5]


async def test_a_lost_message_fails_the_stream(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    async def lose_one(call: ServedCall) -> None:
        await call.accepted()
        call.next_sequence += 1
        await call.tokens("late")
        await call.cancelled.wait()

    server.scripts.append(lose_one)

    with pytest.raises(StreamBroken, match="expected message 1, got 2"):
        await adapter.events("Hi")

    await until(server.requests[0].cancelled)


async def test_an_error_status_after_finished_is_raised(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    async def finish(call: ServedCall) -> None:
        await accept_and_send_tokens(call)
        await call.finished()

    server.scripts.append(failing(grpc.StatusCode.INTERNAL, "INTERNAL", after=finish))
    events: list[Event] = []

    with pytest.raises(Exception, match="INTERNAL"):
        await adapter.events("Hi", into=events)

    assert not any(isinstance(event, Finished) for event in events)


async def test_leaving_early_cancels_the_request(
    adapter: ClientAdapter, server: ScriptedServer
) -> None:
    server.scripts.append(send_tokens_and_wait)

    await adapter.stop_after_output("Hi")

    await until(server.requests[0].cancelled)
