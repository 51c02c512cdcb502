"""Multiplex through a real engine delivers the same as Generate."""

from __future__ import annotations

import asyncio

import grpc

from penstock.executor.config import SimulatedPace
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.engine_service import Service, request, service
from support.fronts import PATIENCE_S, collect, text_of, until_empty
from support.multiplex import kind


async def multiplexed(
    served: Service, messages: list[pb.GenerateRequest]
) -> dict[int, list[pb.MultiplexEvent]]:
    """Return the events of all requests, by their index in the list."""
    call = served.stubs[0].Multiplex()
    events: dict[int, list[pb.MultiplexEvent]] = {key: [] for key in range(len(messages))}
    for key, message in enumerate(messages):
        submit = pb.MultiplexSubmit(key=key, generation=message)
        await call.write(pb.MultiplexRequest(submit=submit))
    await call.done_writing()
    async with asyncio.timeout(PATIENCE_S):
        async for response in call:
            for event in response.events:
                events[event.key].append(event)
    assert await call.code() is grpc.StatusCode.OK
    return events


async def test_the_same_as_generate(text: ModelText) -> None:
    async with service(text) as served:
        messages: list[pb.GenerateRequest] = []
        for index in range(24):
            message = request(f"prompt {index} " * (index + 1), max_tokens=3 + index)
            message.sampling.num_outputs = 1 + index % 3
            message.output.return_token_ids = index % 2 == 0
            if index % 4 > 1:
                message.output.min_chunk_tokens = 5
            messages.append(message)
        shared = await multiplexed(served, messages)
        for key, message in enumerate(messages):
            alone = await collect(served.stubs[0].Generate(message))
            responses = [event.response for event in shared[key]]
            assert [r.sequence for r in responses] == list(range(len(responses)))
            for index in range(message.sampling.num_outputs):
                assert text_of(responses, index) == text_of(alone, index)
                assert records_of(responses, index) == records_of(alone, index)
            assert list(responses[-1].finished.outputs) == list(alone[-1].finished.outputs)
        assert served.engine.dispatcher.num_live == 0
        assert served.fronts[0].num_live_requests == 0


def records_of(responses: list[pb.GenerateResponse], output_index: int) -> list[int]:
    return [
        record.id
        for response in responses
        if response.tokens.output_index == output_index
        for record in response.tokens.records
    ]


async def test_a_killed_engine_ends_every_request_and_not_the_call(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME, max_replays=0) as served:
        call = served.stubs[0].Multiplex()
        for key in range(12):
            generation = request(f"prompt {key}", max_tokens=900)
            submit = pb.MultiplexSubmit(key=key, generation=generation)
            await call.write(pb.MultiplexRequest(submit=submit))
        ends: dict[int, str] = {}
        is_killed = False
        async with asyncio.timeout(PATIENCE_S):
            while len(ends) < 12:
                response = await call.read()
                assert isinstance(response, pb.MultiplexResponse)
                for event in response.events:
                    if kind(event) == "tokens" and not is_killed:
                        is_killed = True
                        served.engine.close()
                    elif event.HasField("error"):
                        ends[event.key] = kind(event)
            assert set(ends.values()) == {"ENGINE_DOWN"}
            late = pb.MultiplexSubmit(key=99, generation=request())
            await call.write(pb.MultiplexRequest(submit=late))
            response = await call.read()
            assert isinstance(response, pb.MultiplexResponse)
            assert [kind(event) for event in response.events] == ["ENGINE_DOWN"]
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert served.fronts[0].num_live_requests == 0


async def test_a_dropped_call_frees_the_engine(text: ModelText) -> None:
    async with service(text, pace=SimulatedPace.REAL_TIME) as served:
        call = served.stubs[0].Multiplex()
        for key in range(12):
            submit = pb.MultiplexSubmit(key=key, generation=request(max_tokens=1000))
            await call.write(pb.MultiplexRequest(submit=submit))
        assert isinstance(await call.read(), pb.MultiplexResponse)
        call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await until_empty(served.fronts[0].front.table)
        # The engine serves others at once: all eight places are free again.
        responses = await collect(served.stubs[0].Generate(request(max_tokens=5)))
        assert responses[-1].finished.usage.num_completion_tokens == 5
