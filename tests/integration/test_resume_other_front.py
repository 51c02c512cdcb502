"""Resume on another front than the one that has the request, also after that front was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import rich_error
from support.resumed import (
    num_tokens_of,
    outputs_of,
    read_and_cancel,
    read_some,
    resumable,
    resume_after,
    resumed,
    unbroken,
)
from support.stepped_service import SteppedService, another_front, stepped


@pytest.fixture
async def fronts(text: ModelText) -> AsyncIterator[tuple[SteppedService, SteppedService]]:
    async with stepped(text) as first, another_front(first) as second:
        yield first, second


def several(message: pb.GenerateRequest) -> None:
    message.sampling.num_outputs = 3
    message.sampling.temperature = 1.0
    message.sampling.seed = 5


def with_logprobs(message: pb.GenerateRequest) -> None:
    message.output.logprobs = 2
    message.output.echo = True
    message.output.prompt_logprobs = 1


def plain(message: pb.GenerateRequest) -> None:
    message.output.return_token_ids = False


def with_stops(message: pb.GenerateRequest) -> None:
    message.stopping.stop_strings.extend(["zzzz", "qqqq"])


def in_chunks(message: pb.GenerateRequest) -> None:
    message.output.min_chunk_tokens = 7
    message.output.max_chunk_delay.FromSeconds(10)


Edit = Callable[[pb.GenerateRequest], None]
edits = pytest.mark.parametrize(
    "edit", [several, with_logprobs, plain, with_stops, in_chunks], ids=lambda edit: edit.__name__
)


async def whole_of(service: SteppedService, message: pb.GenerateRequest) -> list[Any]:
    """Run a copy of the request without an interruption; return its stream."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(message)
    copy.request_id = "whole"
    return await service.end_of(service.stub.Generate(copy))


@edits
@pytest.mark.parametrize("num_read", [1, 5])
async def test_a_stream_is_resumed_at_another_front(
    fronts: tuple[SteppedService, SteppedService], edit: Edit, num_read: int
) -> None:
    first, second = fronts
    message = resumable(num_tokens=120)
    edit(message)
    whole = await whole_of(first, message)
    call = first.stub.Generate(message)
    reported = await read_some(first, call, num_read)
    if message.output.echo and not any(num_tokens_of(reported)):
        reported = reported[:1]  # no client knows how many prompt tokens the other messages had
    rest: list[Any] = await second.end_of(
        second.stub.Resume(resume_after(reported, message.sampling.num_outputs or 1))
    )
    responses = [*reported, *(r.response for r in rest)]
    assert unbroken(responses)
    assert outputs_of(responses) == outputs_of(whole)
    assert echo_of(responses) == echo_of(whole)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.end_of(call)
    assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"
    assert first.server.num_live_requests == second.server.num_live_requests == 0
    assert first.is_clean()
    again: list[Any] = await first.end_of(first.stub.Resume(resumed("r")))
    assert outputs_of([r.response for r in again]) == outputs_of(whole), "and back"


def echo_of(responses: list[Any]) -> bytes:
    """Return the merged prompt events of the messages, encoded."""
    prompt = pb.GenerateResponse().prompt
    for response in responses:
        prompt.MergeFrom(response.prompt)
    return prompt.SerializeToString(deterministic=True)


async def received_before_the_end(
    service: SteppedService, call: Any, num_messages: int
) -> list[Any]:
    """Read up to `num_messages` messages that precede the finished event. There may be fewer,
    because several tokens may share a message.
    """
    reported: list[Any] = []
    while len(reported) < num_messages:
        (message,) = await read_some(service, call, 1)
        if message.HasField("finished"):
            break
        reported.append(message)
    return reported


@edits
@pytest.mark.parametrize(("num_read", "num_more"), [(1, 0), (9, 3), (9, 100)])
async def test_requests_of_a_lost_front_continue(
    fronts: tuple[SteppedService, SteppedService], edit: Edit, num_read: int, num_more: int
) -> None:
    first, second = fronts
    message = resumable(num_tokens=30)
    edit(message)
    whole = await whole_of(first, message)
    call = first.stub.Generate(message)
    reported = await received_before_the_end(first, call, num_read)
    if message.output.echo and not any(num_tokens_of(reported)):
        reported = reported[:1]  # no client knows how many prompt tokens the other messages had
    first.step(num_more)
    await first.disconnect()
    request = resume_after(reported, message.sampling.num_outputs or 1)
    rest: list[Any] = await second.end_of(second.stub.Resume(request))
    responses = [*reported, *(r.response for r in rest)]
    assert unbroken(responses)
    assert outputs_of(responses) == outputs_of(whole)
    assert echo_of(responses) == echo_of(whole)
    assert second.server.num_live_requests == 0
    assert first.is_clean()


@pytest.mark.parametrize(
    ("next_sequence", "num_received"),
    [(9, [1, 1]), (9, [1000])],
    ids=["too many outputs", "tokens that never were"],
)
async def test_mismatched_token_counts_are_out_of_range_and_change_nothing(
    fronts: tuple[SteppedService, SteppedService], next_sequence: int, num_received: list[int]
) -> None:
    first, second = fronts
    message = resumable(num_tokens=200)
    whole = await whole_of(first, message)
    reported = await read_and_cancel(first, first.stub.Generate(message), 9)
    await first.disconnect()
    wrong = resumed("r", next_sequence=next_sequence, num_received=num_received)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.end_of(second.stub.Resume(wrong))
    assert rich_error(caught.value).info.reason == "SEQUENCE_UNAVAILABLE"
    right = resumed("r", next_sequence=9, num_received=num_tokens_of(reported))
    rest: list[Any] = await second.end_of(second.stub.Resume(right))
    assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)


async def test_a_cancelled_resume_does_not_lose_the_stream(
    fronts: tuple[SteppedService, SteppedService],
) -> None:
    first, second = fronts
    reported = await read_and_cancel(first, first.stub.Generate(resumable(num_tokens=200)), 5)
    call = second.stub.Resume(resume_after(reported))
    await second.until(lambda: second.server.num_active_calls == 1)
    call.cancel()
    await second.until(lambda: not second.server.num_active_calls)
    rest: list[Any] = await second.end_of(second.stub.Resume(resume_after(reported)))
    assert unbroken([*reported, *(r.response for r in rest)])


async def test_a_front_that_disconnects_during_a_resume_leaves_its_requests(
    fronts: tuple[SteppedService, SteppedService],
) -> None:
    first, second = fronts
    message = resumable(num_tokens=200)
    whole = await whole_of(first, message)
    reported = await read_and_cancel(first, first.stub.Generate(message), 5)
    counts = num_tokens_of(reported)
    call = second.stub.Resume(resumed("r", next_sequence=5, num_received=counts))
    reading = asyncio.ensure_future(second.end_of(call))
    await first.disconnect()
    rest: list[Any] = await reading
    assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)


async def test_a_drained_front_leaves_its_streams_to_others(text: ModelText) -> None:
    async with stepped(text) as first, another_front(first) as second:
        message = resumable(num_tokens=200)
        whole = await whole_of(first, message)
        call = first.stub.Generate(message)
        reported = await read_some(first, call, 9)
        await first.server.drain(0.0)
        await first.disconnect()
        counts = num_tokens_of(reported)
        request = resumed("r", next_sequence=9, num_received=counts)
        rest: list[Any] = await second.end_of(second.stub.Resume(request))
        assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)


async def test_another_tenant_cannot_resume_on_another_front(text: ModelText) -> None:
    key = "x-tenant"
    front = FrontConfig(tenant_metadata_key=key)
    async with (
        stepped(text, front=front) as first,
        another_front(first, tenant_metadata_key=key) as second,
    ):
        call = first.stub.Generate(resumable(num_tokens=200), metadata=((key, "a"),))
        reported = await read_and_cancel(first, call, 5)
        for other in ((), ((key, "b"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.end_of(second.stub.Resume(resumed("r"), metadata=other))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        mine = second.stub.Resume(resume_after(reported), metadata=((key, "a"),))
        rest: list[Any] = await second.end_of(mine)
        assert unbroken([*reported, *(r.response for r in rest)])
