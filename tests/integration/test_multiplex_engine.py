from __future__ import annotations

import asyncio

import grpc

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import collect, text_of
from support.generate_requests import limited
from support.stepped_service import SteppedService, running
from support.timeout import TEST_TIMEOUT_S, until_true


async def multiplexed(
    served: SteppedService, messages: list[pb.GenerateRequest]
) -> dict[int, list[pb.MultiplexEvent]]:
    """Send all requests on one Multiplex call; return the events of each, by its index
    in the list.
    """
    call = served.stub.Multiplex()
    events: dict[int, list[pb.MultiplexEvent]] = {key: [] for key in range(len(messages))}
    for key, message in enumerate(messages):
        submit = pb.MultiplexSubmit(key=key, generation=message)
        await call.write(pb.MultiplexRequest(submit=submit))
    await call.done_writing()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        async for response in call:
            for event in response.events:
                events[event.key].append(event)
    assert await call.code() is grpc.StatusCode.OK
    return events


async def test_multiplex_delivers_the_same_as_generate(text: ModelText) -> None:
    async with running(text) as served:
        messages: list[pb.GenerateRequest] = []
        for index in range(24):
            message = limited(f"prompt {index} " * (index + 1), max_tokens=3 + index)
            message.sampling.num_outputs = 1 + index % 3
            message.output.return_token_ids = index % 2 == 0
            if index % 4 > 1:
                message.output.min_chunk_tokens = 5
            messages.append(message)
        shared = await multiplexed(served, messages)
        for key, message in enumerate(messages):
            alone = await collect(served.stub.Generate(message))
            responses = [event.response for event in shared[key]]
            assert [r.sequence for r in responses] == list(range(len(responses)))
            for index in range(message.sampling.num_outputs):
                assert text_of(responses, index) == text_of(alone, index)
                assert records_of(responses, index) == records_of(alone, index)
            assert list(responses[-1].finished.outputs) == list(alone[-1].finished.outputs)
        assert served.link.dispatcher.num_live == 0
        assert served.server.num_live_requests == 0


def records_of(responses: list[pb.GenerateResponse], output_index: int) -> list[int]:
    return [
        record.id
        for response in responses
        if response.tokens.output_index == output_index
        for record in response.tokens.records
    ]


async def test_a_dropped_call_frees_the_engine(text: ModelText) -> None:
    async with running(text, is_real_time=True) as served:
        call = served.stub.Multiplex()
        for key in range(12):
            submit = pb.MultiplexSubmit(key=key, generation=limited(max_tokens=1000))
            await call.write(pb.MultiplexRequest(submit=submit))
        assert isinstance(await call.read(), pb.MultiplexResponse)
        call.cancel()
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await until_true(lambda: not len(served.front.table))
        # All eight slots are free again, so the engine serves the next request at once.
        responses = await collect(served.stub.Generate(limited(max_tokens=5)))
        assert responses[-1].finished.usage.num_completion_tokens == 5
