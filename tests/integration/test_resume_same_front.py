"""Resume on the front that has the request, over a real socket; the test steps the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import NO_TIME
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.core import FakeClock
from support.fronts import SMALL_WINDOW, rich_error
from support.record_log import RecordLog
from support.resumed import (
    outputs_of,
    read_and_cancel,
    read_some,
    resumable,
    resume_after,
    resumed,
)
from support.stepped_service import SteppedService, stepped


@pytest.fixture
async def service(text: ModelText) -> AsyncIterator[SteppedService]:
    async with stepped(text) as service:
        yield service


async def undisturbed(service: SteppedService, **fields: Any) -> list[pb.GenerateResponse]:
    """Return the uninterrupted stream of the same request. `fields`: arguments of `resumable`."""
    call = service.stub.Generate(resumable(request_id="whole", **fields))
    return await service.end_of(call)


async def answer_of(call: Any) -> Any:
    return await call


async def read_one(call: Any) -> Any:
    return await call.read()


async def test_a_lost_stream_resumes_at_its_position(service: SteppedService) -> None:
    whole = await undisturbed(service, num_tokens=40)
    call = service.stub.Generate(resumable(num_tokens=40))
    first = await read_and_cancel(service, call, 8)
    await service.until(lambda: not service.step())
    assert service.is_clean(), "it went on without a reader, to its end"
    rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(first)))
    responses = [*first, *(r.response for r in rest)]
    assert [r.sequence for r in responses] == list(range(len(responses)))
    assert outputs_of(responses) == outputs_of(whole)


async def test_a_finished_result_can_be_resumed_at_any_position(service: SteppedService) -> None:
    whole = await service.end_of(service.stub.Generate(resumable(num_tokens=20)))
    for start in range(len(whole) + 1):
        first = whole[:start]
        rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(first)))
        responses = [*first, *(r.response for r in rest)]
        assert [r.sequence for r in responses] == list(range(len(responses)))
        if rest:
            assert outputs_of(responses) == outputs_of(whole)


async def test_resume_continues_live(service: SteppedService) -> None:
    whole = await undisturbed(service, num_tokens=200)
    call = service.stub.Generate(resumable(num_tokens=200))
    first = await read_and_cancel(service, call, 5)
    resume = service.stub.Resume(resume_after(first))
    second = await read_some(service, resume, 3)
    resume.cancel()
    await service.until(lambda: not service.server.num_active_calls)
    so_far = [*first, *(r.response for r in second)]
    rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(so_far)))
    responses = [*so_far, *(r.response for r in rest)]
    assert [r.sequence for r in responses] == list(range(len(responses)))
    assert outputs_of(responses) == outputs_of(whole)


async def test_an_older_stream_of_the_request_ends_as_superseded(service: SteppedService) -> None:
    call = service.stub.Generate(resumable(num_tokens=400))
    await read_some(service, call, 3)
    resume = service.stub.Resume(resumed("r", next_sequence=3))
    await read_some(service, resume, 2)
    newest = service.stub.Resume(resumed("r", next_sequence=0))
    rest: list[Any] = await service.end_of(newest)
    for older in (call, resume):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(older)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.ABORTED
        assert error.info.reason == "STREAM_SUPERSEDED"
    assert rest[0].response.HasField("accepted")
    assert rest[-1].response.HasField("finished")


@pytest.mark.parametrize("older", ["of its own call", "resumed"])
async def test_an_older_reader_of_an_ended_request_is_superseded(
    text: ModelText, older: str
) -> None:
    async with stepped(text, channel_options=SMALL_WINDOW) as service:
        message = resumable(num_tokens=400)
        message.output.logprobs = 20
        whole = await undisturbed(service, num_tokens=400)
        call: Any = service.stub.Generate(message)
        if older == "resumed":
            await service.end_of(call)
            call = service.stub.Resume(resumed("r"))

        def is_blocked() -> bool:
            live = service.front.table.get("r", "")
            return (
                live is not None
                and live.stream.is_closed
                and live.stream.has_backlog
                and live.stream.blocked_since_s != NO_TIME
            )

        await service.until(is_blocked, steps=True)
        rest: list[Any] = await service.end_of(service.stub.Resume(resumed("r")))
        assert outputs_of([r.response for r in rest]) == outputs_of(whole)
        await service.until(lambda: not service.server.num_active_calls)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
        assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"


@pytest.mark.parametrize(
    ("request_id", "metadata"), [("unknown", "a"), ("r", "b")], ids=["unknown", "another's"]
)
async def test_only_the_tenant_of_a_request_can_resume_it(
    text: ModelText, request_id: str, metadata: str
) -> None:
    front = FrontConfig(tenant_metadata_key="x-tenant")
    async with stepped(text, front=front) as service:
        mine = (("x-tenant", "a"),)
        await service.end_of(service.stub.Generate(resumable(), metadata=mine))
        await service.end_of(service.stub.Resume(resumed("r"), metadata=mine))
        call = service.stub.Resume(resumed(request_id), metadata=(("x-tenant", metadata),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.info.reason == "REQUEST_NOT_FOUND"


@pytest.mark.parametrize("num_received", [[9], [1, 1]], ids=["tokens", "outputs"])
async def test_impossible_token_counts_are_out_of_range(
    service: SteppedService, num_received: list[int]
) -> None:
    reported = await service.end_of(service.stub.Generate(resumable()))
    wrong = resumed("r", next_sequence=3, num_received=num_received)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Resume(wrong))
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.OUT_OF_RANGE
    assert error.info.reason == "SEQUENCE_UNAVAILABLE"
    again: list[Any] = await service.end_of(service.stub.Resume(resumed("r")))
    assert outputs_of([r.response for r in again]) == outputs_of(reported)


async def test_more_tokens_than_an_ended_request_has_are_out_of_range(
    service: SteppedService,
) -> None:
    await read_and_cancel(service, service.stub.Generate(resumable(num_tokens=400)), 4)
    await service.stub.Cancel(pb.CancelRequest(request_id="r"))
    service.step(2)
    wrong = resumed("r", next_sequence=3, num_received=[300])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Resume(wrong))
    assert rich_error(caught.value).info.reason == "SEQUENCE_UNAVAILABLE"


async def test_a_sequence_near_the_maximum_is_rejected_by_its_field(
    service: SteppedService,
) -> None:
    await service.end_of(service.stub.Generate(resumable()))
    most = 2**63 - 1
    rest: list[Any] = await service.end_of(service.stub.Resume(resumed("r", next_sequence=most)))
    assert rest[-1].response.HasField("finished")
    for number in (most + 1, 2**64 - 1):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(service.stub.Resume(resumed("r", next_sequence=number)))
        error = rich_error(caught.value)
        assert (error.info.reason, error.fields) == ("INVALID_ARGUMENT", ["next_sequence"])


async def test_a_stream_that_is_not_resumed_ends_with_its_resume_timeout(text: ModelText) -> None:
    clock = FakeClock(100.0)
    async with stepped(text, clock=clock) as service:
        call = service.stub.Generate(resumable(num_tokens=400, resume_timeout_s=5.0))
        await read_and_cancel(service, call, 4)
        service.read_commands()
        clock.now_s += 4.9
        service.link.dispatcher.sweep()
        assert service.server.num_live_requests == 1
        clock.now_s += 0.1
        service.link.dispatcher.sweep()
        await service.until(lambda: not service.server.num_live_requests, steps=True)
        assert service.is_clean()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(service.stub.Resume(resumed("r", next_sequence=4)))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_kept_result_expires(text: ModelText) -> None:
    clock = FakeClock(100.0)
    async with stepped(text, clock=clock) as service:
        await service.end_of(service.stub.Generate(resumable(resume_timeout_s=5.0)))
        service.read_commands()
        kept = service.link.dispatcher.kept
        clock.now_s += 4.0
        await service.end_of(service.stub.Resume(resumed("r")))
        service.read_commands()
        clock.now_s += 4.0
        kept.sweep()
        assert len(kept) == 1, "whoever reads it prolongs it"
        clock.now_s += 1.0
        kept.sweep()
        assert (len(kept), kept.num_bytes) == (0, 0)


async def test_cancel_of_a_request_without_a_call(service: SteppedService) -> None:
    call = service.stub.Generate(resumable(num_tokens=400))
    reported = await read_and_cancel(service, call, 4)
    answer = await service.stub.Cancel(pb.CancelRequest(request_id="r"))
    assert answer.state == state_pb2.REQUEST_STATE_PROCESSING
    service.step(2)
    assert service.is_clean()
    rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(reported)))
    (end,) = rest[-1].response.finished.outputs
    assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
    cancelling = service.stub.Cancel(pb.CancelRequest(request_id="r"))
    again = await service.result_of(answer_of(cancelling))
    assert again.state == state_pb2.REQUEST_STATE_COMPLETED


async def test_without_resume_a_lost_call_cancels_its_request(service: SteppedService) -> None:
    message = resumable(num_tokens=400)
    message.ClearField("resume_timeout")
    call = service.stub.Generate(message)
    await read_and_cancel(service, call, 4)
    service.read_commands()
    assert service.is_clean()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Resume(resumed("r", next_sequence=4)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_too_large_to_be_kept_is_rejected(text: ModelText) -> None:
    async with stepped(text, front=FrontConfig(max_resume_bytes=900)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(service.stub.Generate(resumable(prompt=[300] * 470)))
        error = rich_error(caught.value)
        assert error.info.reason == "INVALID_ARGUMENT", "a retry would not help"
        assert error.fields == ["resume_timeout"]


@pytest.mark.parametrize("resume_timeout_s", [0.0, 61.0])
async def test_a_resume_timeout_out_of_range_is_rejected_by_its_field(
    service: SteppedService, resume_timeout_s: float
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Generate(resumable(resume_timeout_s=resume_timeout_s)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "resume_timeout" in (caught.value.details() or "")


async def test_a_resume_is_rejected_if_the_service_does_not_offer_it(text: ModelText) -> None:
    async with stepped(text, front=FrontConfig(max_resume_timeout_s=0.0)) as service:
        for call in (
            service.stub.Generate(resumable()),
            service.stub.Resume(resumed("r")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.end_of(call)
            assert rich_error(caught.value).info.metadata["feature"] == "resume"


async def test_a_unary_request_cannot_be_resumed(service: SteppedService) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.GenerateOnce(pb.GenerateOnceRequest(generation=resumable()))
    assert "resume_timeout" in (caught.value.details() or "")


async def test_a_multiplexed_request_is_kept_too(service: SteppedService) -> None:
    whole = await undisturbed(service, num_tokens=30)
    call = service.stub.Multiplex()
    submit = pb.MultiplexSubmit(key=7, generation=resumable(num_tokens=30), num_credit_tokens=6)
    await call.write(pb.MultiplexRequest(submit=submit))
    first: list[pb.GenerateResponse] = []

    async def read() -> None:
        while sum(r.tokens.num_tokens for r in first) < 6:
            first.extend(event.response for event in (await read_one(call)).events)

    await service.result_of(read())
    call.cancel()
    await service.until(lambda: not service.server.num_active_calls)
    rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(first)))
    responses = [*first, *(r.response for r in rest)]
    assert [r.sequence for r in responses] == list(range(len(responses)))
    assert outputs_of(responses) == outputs_of(whole)


async def test_a_multiplexed_request_resumed_elsewhere_ends_on_its_call(
    service: SteppedService,
) -> None:
    call = service.stub.Multiplex()
    submit = pb.MultiplexSubmit(key=7, generation=resumable(num_tokens=30))
    await call.write(pb.MultiplexRequest(submit=submit))
    await service.until_live(1)
    rest: list[Any] = await service.end_of(service.stub.Resume(resumed("r")))
    assert rest[-1].response.HasField("finished")
    events: list[pb.MultiplexEvent] = []

    async def read() -> None:
        while not any(event.HasField("error") for event in events):
            events.extend((await read_one(call)).events)

    await service.result_of(read())
    assert events[-1].error.code == grpc.StatusCode.ABORTED.value[0]
    await call.done_writing()
    await service.until(lambda: not service.server.num_active_calls)


async def test_a_drain_does_not_wait_for_unread_streams(text: ModelText) -> None:
    async with stepped(text) as service:
        await read_and_cancel(service, service.stub.Generate(resumable(num_tokens=400)), 4)
        async with asyncio.timeout(30.0):
            await service.server.drain(1000.0)


async def test_a_stalled_reader_loses_its_call_but_not_its_request(
    text: ModelText, service: SteppedService
) -> None:
    whole = await undisturbed(service, num_tokens=100)
    async with stepped(text, front=FrontConfig(max_backlog_tokens=20)) as service:
        call = service.stub.Generate(resumable(num_tokens=100))
        reported = await read_some(service, call, 3)
        service.step(30)  # before its writer comes to any of it
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
        assert rich_error(caught.value).info.reason == "READER_STALLED"
        rest: list[Any] = await service.end_of(service.stub.Resume(resume_after(reported)))
        assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)


async def test_the_call_that_submitted_a_request_has_its_record(service: SteppedService) -> None:
    log = RecordLog()
    service.front.accounts._recorder = log.recorder  # pyright: ignore[reportPrivateUsage]
    whole = service.stub.Generate(resumable(request_id="whole"))
    await service.end_of(whole)
    reported = await read_and_cancel(service, service.stub.Generate(resumable(num_tokens=40)), 5)
    await service.end_of(service.stub.Resume(resume_after(reported)))
    await service.until(lambda: not service.server.num_active_calls)
    service.front.accounts.flush()
    assert [(one.request_id, one.code) for one in log.records] == [("whole", 0), ("r", 1)]
