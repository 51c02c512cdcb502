"""Case 8: 64 clients open and cancel streams in a loop, next to four ordinary clients.

PENSTOCK_NUM_CANCELS sets the number of cancels, 100,000 for the complete case.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import grpc
import grpc.aio
import psutil

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.observation import is_quiet, model_of, observed, until_stats
from support.service import simulated
from support.stepped_service import ids_of, request
from support.timeout import TEST_TIMEOUT_S

NUM_CANCELS = int(os.environ.get("PENSTOCK_NUM_CANCELS", "3000"))
NUM_CLIENTS = 64
NUM_CANARIES = 4
CANARY_TOKENS = 50
# grpc.aio keeps some memory per cancelled stream, and the first load allocates some permanently.
MAX_BYTES_PER_CANCEL = 250
MAX_BYTES_ONCE = 48 << 20


@dataclass
class Storm:
    """The number of remaining cancels, and the outputs of the ordinary clients."""

    channels: list[grpc.aio.Channel]
    chance: random.Random = field(default_factory=lambda: random.Random(8))
    num_left: int = NUM_CANCELS
    canaries: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])

    async def open_and_cancel(self, client: int) -> None:
        """Open streams, read up to two messages of each and cancel it, until `num_left` is 0."""
        channel = self.channels[client % len(self.channels)]
        stub = pb_grpc.GenerationServiceStub(channel)
        while self.num_left > 0:
            self.num_left -= 1
            call = stub.Generate(request(400, (client, self.chance.randrange(400), 3)))
            for _ in range(self.chance.randint(0, 2)):
                message = await call.read()
                assert isinstance(message, pb.GenerateResponse)
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED

    async def repeat(self, canary: int) -> None:
        stub = pb_grpc.GenerationServiceStub(self.channels[canary % len(self.channels)])
        seen = self.canaries.setdefault(canary, [])
        while self.num_left > 0 or len(seen) < 2:
            message = request(CANARY_TOKENS, (100 + canary, 2, 3))
            call = stub.Generate(message, timeout=TEST_TIMEOUT_S)
            seen.append(ids_of([response async for response in call]))


async def test_case_08_storm_of_cancels() -> None:
    arguments = simulated(cost={"step_s": 0.001, "prefill_token_s": 0.0, "decode_slot_s": 0.0})
    limits = ("--fronts", "1", "--max-num-seqs", "64", "--max-num-waiting", "256")
    async with observed(*arguments, *limits) as (service, operations):
        front = psutil.Process(await service.next_pid("front"))
        channels = [service.channel() for _ in range(4)]
        storm = Storm(channels)
        before = front.memory_info().rss
        async with asyncio.TaskGroup() as group:
            for client in range(NUM_CLIENTS):
                group.create_task(storm.open_and_cancel(client))
            for canary in range(NUM_CANARIES):
                group.create_task(storm.repeat(canary))
        for seen in storm.canaries.values():
            assert len(seen[0]) == CANARY_TOKENS
            assert all(ids == seen[0] for ids in seen), "a canary was told something else"
        stats = await until_stats(
            operations,
            lambda stats: is_quiet(stats) and not any(front.num_streams for front in stats.fronts),
        )
        assert model_of(stats).totals.num_failed == 0
        growth = front.memory_info().rss - before
        assert growth < NUM_CANCELS * MAX_BYTES_PER_CANCEL + MAX_BYTES_ONCE
        await asyncio.gather(*(channel.close() for channel in channels))
