"""Engines are killed under streams; the streams deliver the same tokens as without the kills."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import state_pb2
from support.service import PATIENCE_S, Service, simulated, started

NUM_STREAMS = 32
NUM_KILLS = 4
"""The fifth death within a minute makes the service give up."""
NUM_TOKENS = 300


@dataclass
class Heard:
    """Everything that one client received; its call is read to the end."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    num_messages: int = 0
    num_returns: int = 0
    """How often the request was reported waiting again."""
    num_finished: int = 0
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: pb.GenerateResponse) -> None:
        assert message.sequence == self.num_messages, "a message is missing or came twice"
        assert not self.num_finished, "a word after the last"
        self.num_messages += 1
        self.text += message.tokens.text
        self.token_ids += [record.id for record in message.tokens.records]
        waits = message.progress.state == state_pb2.REQUEST_STATE_PENDING
        self.num_returns += waits and bool(self.token_ids)
        self.num_finished += message.HasField("finished")
        self.news.set()


def request(number: int) -> pb.GenerateRequest:
    """Return a greedy request for an even number, a seeded one for an odd number."""
    message = pb.GenerateRequest(request_id=f"stream-{number}")
    message.token_prompt.ids.extend([5 + number, 6, 7, 8])
    message.sampling.temperature = float(number % 2)
    message.sampling.seed = number
    message.stopping.max_tokens = NUM_TOKENS
    message.stopping.ignore_eos = True
    message.output.return_token_ids = True
    return message


async def listen(channel: grpc.aio.Channel, number: int, heard: Heard) -> None:
    call = pb_grpc.GenerationServiceStub(channel).Generate(request(number), timeout=PATIENCE_S)
    try:
        async for message in call:
            heard.take(message)
    except grpc.aio.AioRpcError:
        pass
    heard.code = await call.code()


async def all_streams(service: Service, kills: Sequence[int]) -> list[Heard]:
    """Run all streams to their end; kill the engine whenever the first has one of the `kills` token
    counts.
    """
    channels = [service.channel() for _ in range(4)]
    heard = [Heard() for _ in range(NUM_STREAMS)]
    tasks = [
        asyncio.create_task(listen(channels[number % 4], number, one))
        for number, one in enumerate(heard)
    ]
    for num_tokens in kills:
        engine = await service.next_pid("engine")
        await until(heard[0], num_tokens)
        os.kill(engine, signal.SIGKILL)
    await asyncio.gather(*tasks)
    await asyncio.gather(*(channel.close() for channel in channels))
    return heard


async def until(heard: Heard, num_tokens: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(heard.token_ids) < num_tokens:
            await heard.news.wait()
            heard.news.clear()


async def test_case_24_killed_engines_cost_a_pause_and_nothing_else() -> None:
    async with started(*simulated(), "--fronts", "2", "--max-num-seqs", "24") as service:
        kills = [(index + 1) * NUM_TOKENS // (NUM_KILLS + 1) for index in range(NUM_KILLS)]
        disturbed = await all_streams(service, kills)
        await service.next_pid("engine")
        undisturbed = await all_streams(service, [])
        for one, other in zip(undisturbed, disturbed, strict=True):
            assert one.code is other.code is grpc.StatusCode.OK
            assert len(one.token_ids) == NUM_TOKENS
            assert other.token_ids == one.token_ids
            assert other.text == one.text
            assert one.num_finished == other.num_finished == 1
        # Those that ran from the first step on were in the batch at every death.
        assert disturbed[0].num_returns >= NUM_KILLS
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_case_24_one_answer_and_many_over_one_call_live_on_too() -> None:
    async with started(*simulated()) as service, service.channel() as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        engine = await service.next_pid("engine")
        once: Any = stub.GenerateOnce(
            pb.GenerateOnceRequest(generation=request(1)), timeout=PATIENCE_S
        )
        many = stub.Multiplex(timeout=PATIENCE_S)
        submit = pb.MultiplexSubmit(key=1, generation=request(2))
        await many.write(pb.MultiplexRequest(submit=submit))
        is_dead = False
        ids: list[int] = []
        while True:
            answer: Any = await many.read()
            for event in answer.events:
                ids += [record.id for record in event.response.tokens.records]
            if len(ids) > NUM_TOKENS // 4 and not is_dead:
                os.kill(engine, signal.SIGKILL)
                is_dead = True
            if any(event.response.HasField("finished") for event in answer.events):
                break
        await many.done_writing()
        answered = await once
        assert is_dead
        heard = [Heard(), Heard()]
        await asyncio.gather(
            *(listen_again(channel, number, one) for number, one in zip((1, 2), heard, strict=True))
        )
        told = [record.id for output in answered.outputs for record in output.records]
        assert [told, ids] == [one.token_ids for one in heard]


async def listen_again(channel: grpc.aio.Channel, number: int, heard: Heard) -> None:
    await listen(channel, number, heard)
    assert heard.code is grpc.StatusCode.OK
