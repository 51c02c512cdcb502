"""Streams of Generate that end early, because the request is cancelled or rejected, misses its
deadline, or loses its engine.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import ServedFront, collect, rich_error, serving, text_of
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S


async def test_the_cancel_rpc_ends_the_stream_with_its_text_and_status_ok(
    served: ServedFront,
) -> None:
    call = served.stub.Generate(text_request("hello", request_id="to-cancel"))
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    served.port.send(spec.key, served.encode("partial"))
    answer = await served.stub.Cancel(pb.CancelRequest(request_id="to-cancel"))
    assert answer.state == state_pb2.REQUEST_STATE_PROCESSING
    assert await served.port.next_cancel() == ((spec.key,), FinishReason.CANCELLED)
    served.port.finish(spec.key, FinishReason.CANCELLED)
    responses = await collect(call)
    assert text_of(responses) == "partial"
    assert responses[-1].finished.outputs[0].finish_reason == state_pb2.FINISH_REASON_CANCELLED
    assert await call.code() is grpc.StatusCode.OK


async def test_cancel_finds_requests_of_other_fronts_or_returns_not_found(
    served: ServedFront,
) -> None:
    served.port.known_elsewhere["elsewhere"] = RequestState.PENDING
    answer = await served.stub.Cancel(pb.CancelRequest(request_id="elsewhere"))
    assert answer.state == state_pb2.REQUEST_STATE_PENDING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Cancel(pb.CancelRequest(request_id="nowhere"))
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.info.reason == "REQUEST_NOT_FOUND"
    assert error.request_id == "nowhere"


async def test_a_duplicate_request_id_is_rejected_and_the_first_request_unaffected(
    served: ServedFront,
) -> None:
    first = served.stub.Generate(text_request("hello", request_id="same"))
    (spec,) = await served.port.next_submission()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.stub.Generate(text_request("other", request_id="same")))
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.ALREADY_EXISTS
    assert error.info.reason == "REQUEST_ID_IN_USE"
    assert error.request_id == "same"
    served.port.finish(spec.key)
    await collect(first)
    assert await first.code() is grpc.StatusCode.OK
    again = served.stub.Generate(text_request("hello", request_id="same"))
    (spec,) = await served.port.next_submission()
    served.port.finish(spec.key)
    await collect(again)


async def test_acceptance_is_sent_after_a_while_without_events(text: ModelText) -> None:
    async with serving(text, FrontConfig(acceptance_delay_s=0.001)) as served:
        call = served.stub.Generate(text_request("hello"))
        await served.port.next_submission()
        response = await asyncio.wait_for(call.read(), TEST_TIMEOUT_S)
        assert isinstance(response, pb.GenerateResponse)
        assert response.WhichOneof("event") == "accepted"
        call.cancel()


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_deadline_error_has_the_state_of_the_request(
    served: ServedFront, phase: str
) -> None:
    message = text_request("hello")
    message.scheduling.total_timeout.FromSeconds(30)
    call = served.stub.Generate(message)
    (spec,) = await served.port.next_submission()
    assert spec.deadline_s == pytest.approx(spec.arrival_s + 30)
    if phase != "queue":
        served.port.admit(spec.key)
    if phase == "decode":
        served.port.send(spec.key, served.encode("abc"))
    served.port.fail(spec.key, FailureReason.DEADLINE_EXCEEDED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.info.metadata["phase"] == phase
    assert error.info.metadata["state"] == ("PENDING" if phase == "queue" else "PROCESSING")
    assert error.info.metadata["deadline"] == "total"


async def test_grpc_deadline_releases_the_request(served: ServedFront) -> None:
    call = served.stub.Generate(text_request("hello"), timeout=4.0)
    (spec,) = await served.port.next_submission()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await served.port.next_cancel() == ((spec.key,), FinishReason.CANCELLED)


async def test_a_grpc_deadline_beyond_the_servers_limit_is_reduced_to_it(text: ModelText) -> None:
    config = FrontConfig(default_deadline_s=12.0, max_deadline_s=50.0, acceptance_delay_s=0.0)
    async with serving(text, config) as served:
        call = served.stub.Generate(text_request("hello"), timeout=7200)
        (spec,) = await served.port.next_submission()
        assert spec.deadline_s == pytest.approx(spec.arrival_s + 50)
        served.port.fail(spec.key, FailureReason.DEADLINE_EXCEEDED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert rich_error(caught.value).info.metadata["deadline"] == "server"


async def test_without_replay_a_lost_engine_ends_every_stream_and_is_replaced(
    text: ModelText,
) -> None:
    config = FrontConfig(acceptance_delay_s=0.0, max_replays=0)
    async with serving(text, config) as served:
        calls = [served.stub.Generate(text_request("hello")) for _ in range(3)]
        for _ in calls:
            (spec,) = await served.port.next_submission()
            served.port.admit(spec.key)
            served.port.send(spec.key, served.encode("text"))
        served.port.go_down()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            error = rich_error(caught.value)
            assert error.code is grpc.StatusCode.UNAVAILABLE
            assert error.info.reason == "ENGINE_DOWN"
            assert error.retry_s is not None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(served.stub.Generate(text_request("hello")))
        assert rich_error(caught.value).info.reason == "ENGINE_DOWN"
        served.port.come_up(epoch=2)
        call = served.stub.Generate(text_request("hello"))
        (spec,) = await served.port.next_submission()
        served.port.finish(spec.key)
        await collect(call)


async def test_a_lost_engine_only_delays_streams_with_replay(served: ServedFront) -> None:
    calls = [served.stub.Generate(text_request("hello")) for _ in range(3)]
    specs = [(await served.port.next_submission())[0] for _ in calls]
    for spec in specs:
        served.port.admit(spec.key)
        served.port.send(spec.key, served.encode("one "))
    served.port.go_down()
    served.port.come_up(epoch=2)
    for _ in specs:
        (again,) = await served.port.next_submission()
        served.port.send(again.key, served.encode("two"))
        served.port.finish(again.key)
    for call in calls:
        reported = await collect(call)
        assert [message.sequence for message in reported] == list(range(len(reported)))
        assert text_of(reported) == "one two"
        assert reported[-1].HasField("finished")


async def test_a_faulty_stream_does_not_affect_the_others(
    served: ServedFront, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine omits the requested log probabilities of one request, so the front raises an
    exception.
    """
    poisoned_request = text_request("secret-canary")
    poisoned_request.output.logprobs = 0
    poisoned = served.stub.Generate(poisoned_request)
    (bad,) = await served.port.next_submission()
    healthy = served.stub.Generate(text_request("hello"))
    (good,) = await served.port.next_submission()
    token_id = served.encode("a")[0]
    served.port.emit(tokens=[(bad.key, token_id), (good.key, token_id)])
    served.port.finish(good.key)
    assert text_of(await collect(healthy)) == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(poisoned)
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.info.reason == "INTERNAL"
    assert "ValueError" not in error.message
    assert "ValueError" in caplog.text
    assert "secret-canary" not in caplog.text
