"""Generate through a real engine: front, link, scheduler and the simulated executor together."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.executor.config import SimulatedPace
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.engine_service import request, service
from support.fronts import PATIENCE_S, collect, rich_error, text_of, until_empty


async def test_many_streams_at_once_equal_each_alone(text: ModelText) -> None:
    async with service(text) as served:
        messages = []
        for index in range(24):
            message = request(f"prompt {index} " * (index + 1), max_tokens=3 + index)
            message.sampling.num_outputs = 1 + index % 3
            message.output.return_token_ids = True
            messages.append(message)
        streams = await asyncio.gather(
            *(collect(served.stubs[0].Generate(message)) for message in messages)
        )
        for message, responses in zip(messages, streams, strict=True):
            alone = await served.stubs[0].GenerateOnce(pb.GenerateOnceRequest(generation=message))
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
        assert served.engine.dispatcher.num_live == 0
        assert served.fronts[0].num_live_requests == 0


async def test_stop_string_of_a_running_request(text: ModelText) -> None:
    async with service(text) as served:
        whole = text_of(await collect(served.stubs[0].Generate(request(max_tokens=60))))
        stop = whole[10:14]
        message = request(max_tokens=60)
        message.stopping.stop_strings.append(stop)
        responses = await collect(served.stubs[0].Generate(message))
        assert text_of(responses) == whole[: whole.index(stop)]
        (end,) = responses[-1].finished.outputs
        assert end.stop_string == stop
        assert end.finish_reason == state_pb2.FINISH_REASON_STOP


async def test_ids_are_unique_over_all_fronts_and_cancel_reaches_any(text: ModelText) -> None:
    async with service(text, num_fronts=2, pace=SimulatedPace.REAL_TIME) as served:
        first, second = served.stubs
        call = first.Generate(request(max_tokens=1000, request_id="one"))
        await anext(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(second.Generate(request(request_id="one")))
        assert rich_error(caught.value).info.reason == "REQUEST_ID_IN_USE"
        answer = await second.Cancel(pb.CancelRequest(request_id="one"))
        assert answer.state == state_pb2.REQUEST_STATE_PROCESSING
        responses = await collect(call)
        (end,) = responses[-1].finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
        assert end.num_completion_tokens < 1000


async def test_full_queue_is_told_before_anything_else(text: ModelText) -> None:
    async with service(text, max_num_waiting=1, max_num_seqs=1) as served:
        calls = [served.stubs[0].Generate(request(max_tokens=200)) for _ in range(12)]
        outcomes = await asyncio.gather(*(collect(c) for c in calls), return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, grpc.aio.AioRpcError)]
        assert len(refused) < len(calls)
        for error in refused:
            rich = rich_error(error)
            assert rich.info.reason == "QUEUE_FULL"
            assert rich.retry_s is not None
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                assert outcome[-1].WhichOneof("event") == "finished"


async def test_clients_that_leave_free_the_engine(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME) as served:
        calls = [served.stubs[0].Generate(request(max_tokens=1000)) for _ in range(16)]
        await asyncio.gather(*(anext(aiter(call)) for call in calls))
        for call in calls:
            call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await until_empty(served.fronts[0].front.table)
            # The engine takes the cancels with its next step.
            while served.engine.dispatcher.num_live:
                await served.stubs[0].GenerateOnce(
                    pb.GenerateOnceRequest(generation=request(max_tokens=1))
                )


async def test_death_of_the_engine_ends_all_streams_without_replay(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME, max_replays=0) as served:
        calls = [served.stubs[0].Generate(request(max_tokens=1000)) for _ in range(8)]
        await asyncio.gather(*(anext(aiter(call)) for call in calls))
        served.engine.close()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            assert rich_error(caught.value).info.reason == "ENGINE_DOWN"
        assert not served.fronts[0].health.is_serving


async def test_deadline_of_the_request_ends_it_with_the_reason(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME) as served:
        message = request(max_tokens=1000)
        message.scheduling.total_timeout.FromMilliseconds(150)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(served.stubs[0].Generate(message))
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.info.metadata["deadline"] == "total"


async def test_time_limit_keeps_the_partial_text(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME) as served:
        message = request(max_tokens=1000)
        message.scheduling.time_limit.FromMilliseconds(500)
        responses = await collect(served.stubs[0].Generate(message))
        (end,) = responses[-1].finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_TIME_LIMIT
        assert 0 < end.num_completion_tokens < 1000
        assert text_of(responses)
