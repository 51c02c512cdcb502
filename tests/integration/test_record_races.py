"""Hundreds of requests cancelled at random moments on a real engine leave one record each."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.server.front.accounts import Accounts, RequestAccount
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.generate_requests import limited
from support.multiplex import cancel
from support.record_log import RecordLog, check_tiling
from support.stepped_service import running
from support.timeout import TEST_TIMEOUT_S

NUM_REQUESTS = 400
NUM_AT_ONCE = 40


async def generate(stub: pb_grpc.GenerationServiceAsyncStub, number: int, rng: Any) -> bool:
    """Send a request and cancel it at random; return whether the server must have received it."""
    timeout = rng.choice([None, None, 0.002, 0.02])
    message = limited(request_id=f"r-{number}", max_tokens=rng.randint(1, 30))
    call = stub.Generate(message, timeout=timeout)
    num_wanted = rng.choice([0, 1, 3, 1000, 1000])
    num_read = 0
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while num_read < num_wanted and await call.read() is not grpc.aio.EOF:
            num_read += 1
    call.cancel()
    return num_read > 0


async def generate_once(stub: pb_grpc.GenerationServiceAsyncStub, number: int, rng: Any) -> bool:
    generation = limited(request_id=f"r-{number}", max_tokens=rng.randint(1, 30))
    call = stub.GenerateOnce(pb.GenerateOnceRequest(generation=generation))
    for _ in range(rng.choice([0, 10, 1000, 100_000])):
        if call.done():
            return True
        await asyncio.sleep(0)
    call.cancel()
    return False


async def multiplex(stub: pb_grpc.GenerationServiceAsyncStub, number: int, rng: Any) -> bool:
    call = stub.Multiplex()
    is_seen = False
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        submit = pb.MultiplexSubmit(key=1, generation=limited(request_id=f"r-{number}"))
        await call.write(pb.MultiplexRequest(submit=submit))
        if rng.random() < 0.5:
            await call.write(cancel(1))
        if rng.random() < 0.5:
            await call.done_writing()
            for _ in range(rng.choice([1, 3, 1000])):
                if not isinstance(await call.read(), pb.MultiplexResponse):
                    break
                is_seen = True
    call.cancel()
    return is_seen


async def test_every_request_has_exactly_one_record(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RequestAccount] = []
    open_account = Accounts.open

    def opening(self: Accounts, *args: Any, **options: Any) -> RequestAccount:
        opened.append(open_account(self, *args, **options))
        return opened[-1]

    monkeypatch.setattr(Accounts, "open", opening)
    log = RecordLog()
    rng = random.Random(6)
    seen: set[str] = set()
    places = asyncio.Semaphore(NUM_AT_ONCE)
    limits = SchedulerConfig(max_num_waiting=16)
    async with running(text, scheduler=limits, max_num_seqs=4, recorder=log.recorder) as site:
        stub = site.stub

        async def one(number: int) -> None:
            act = rng.choice([generate, generate, generate_once, multiplex])
            async with places:
                if await act(stub, number, rng):
                    seen.add(f"r-{number}")

        async with asyncio.timeout(TEST_TIMEOUT_S):
            await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    reported = Counter(record.request_id for record in log.records)
    assert len(log.records) == len(opened) == log.recorder.num_records
    assert max(reported.values()) == 1, "the ids are all different"
    assert seen <= set(reported)
    assert len(reported) > NUM_REQUESTS / 4
    assert [record.sequence for record in log.records] == list(range(len(opened)))
    assert sum(count.num for count in log.recorder.outcomes()) == len(opened)
    assert log.recorder.num_unreadable == 0
    for record in log.records:
        check_tiling(record)
    # The races test something only if requests ended in both ways.
    assert {record.code for record in log.records} >= {0, grpc.StatusCode.CANCELLED.value[0]}
