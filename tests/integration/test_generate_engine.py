"""Generate through a real engine: front, link, scheduler and the simulated executor together."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import collect, rich_error, text_of
from support.generate_requests import limited
from support.stepped_service import another_front, running


async def test_concurrent_streams_equal_separate_ones(text: ModelText) -> None:
    async with running(text) as served:
        messages = []
        for index in range(24):
            message = limited(f"prompt {index} " * (index + 1), max_tokens=3 + index)
            message.sampling.num_outputs = 1 + index % 3
            message.output.return_token_ids = True
            messages.append(message)
        streams = await asyncio.gather(
            *(collect(served.stub.Generate(message)) for message in messages)
        )
        for message, responses in zip(messages, streams, strict=True):
            alone = await served.stub.GenerateOnce(pb.GenerateOnceRequest(generation=message))
            assert [r.sequence for r in responses] == list(range(len(responses)))
            assert len(responses[-1].finished.outputs) == message.sampling.num_outputs
            for output in alone.outputs:
                ids = [
                    record.id
                    for response in responses
                    if response.WhichOneof("event") == "tokens"
                    and response.tokens.output_index == output.output_index
                    for record in response.tokens.records
                ]
                assert ids == [record.id for record in output.records]
                assert len(ids) == message.stopping.max_tokens
                assert text_of(responses, output.output_index) == output.text
            end = responses[-1].finished
            assert end.usage.num_completion_tokens == sum(
                output.num_completion_tokens for output in end.outputs
            )
            timings = end.timings
            parts_ms = sum(
                part.ToMilliseconds()
                for part in (
                    timings.queue_duration,
                    timings.prefill_duration,
                    timings.decode_duration,
                )
            )
            assert parts_ms <= timings.total_duration.ToMilliseconds() + 1
        assert served.link.dispatcher.num_live == 0
        assert served.server.num_live_requests == 0


async def test_ids_are_unique_over_all_fronts_and_cancel_reaches_any(text: ModelText) -> None:
    async with (
        running(text, is_real_time=True) as served,
        another_front(served) as other,
    ):
        first, second = served.stub, other.stub
        call = first.Generate(limited(max_tokens=1000, request_id="one"))
        await anext(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(second.Generate(limited(request_id="one")))
        assert rich_error(caught.value).info.reason == "REQUEST_ID_IN_USE"
        answer = await second.Cancel(pb.CancelRequest(request_id="one"))
        assert answer.state == state_pb2.REQUEST_STATE_PROCESSING
        responses = await collect(call)
        (end,) = responses[-1].finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
        assert end.num_completion_tokens < 1000


async def test_time_limit_keeps_the_partial_text(text: ModelText) -> None:
    async with running(text, is_real_time=True) as served:
        message = limited(max_tokens=1000)
        message.scheduling.time_limit.FromMilliseconds(2000)
        responses = await collect(served.stub.Generate(message))
        (end,) = responses[-1].finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_TIME_LIMIT
        assert 0 < end.num_completion_tokens < 1000
        assert text_of(responses)
