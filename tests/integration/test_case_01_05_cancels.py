"""Cases 1 to 5: clients cancel in every phase, and two steps later their cache blocks are free.

The test runs each step of the engine, so that steps can be counted; clients are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.core import make_engine, make_info, make_spec
from support.fronts import SMALL_WINDOW, block_writer, serving
from support.generate_requests import text_request
from support.stepped_service import SteppedService, ids_of, request, stepped
from support.timeout import TEST_TIMEOUT_S, until_true

LONG = 400
MOST_STEPS = 2
"""Maximum number of steps from the receipt of a cancel until the request's blocks are free."""
NUM_RACES = int(os.environ.get("PENSTOCK_NUM_RACES", "1500"))
"""The complete case requires 10,000."""


@pytest.fixture
async def one_slot(text: ModelText) -> AsyncIterator[SteppedService]:
    async with stepped(text, max_num_seqs=1) as service:
        yield service


async def test_case_01_cancel_while_pending(one_slot: SteppedService) -> None:
    service = one_slot
    running = service.stub.Generate(request(LONG))
    await service.until_live(1)
    service.step()
    (running_key,) = service.engine.requests
    waiting = service.stub.Generate(request(LONG, (9, 10, 11)))
    await service.until_live(2)
    service.step(5)
    waiting.cancel()
    await service.until(lambda: service.server.num_live_requests == 1)
    assert await waiting.code() is grpc.StatusCode.CANCELLED
    # Receiving the cancel is enough: no step has run.
    service.read_commands()
    assert list(service.engine.requests) == [running_key]
    assert len(service.engine.queue) == 0
    assert set(service.engine.computed) == {running_key}
    running.cancel()


async def test_case_02_cancel_during_the_first_of_four_chunks(text: ModelText) -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_prefill_share=1.0)
    async with stepped(text, scheduler=config) as service:
        call = service.stub.Generate(request(8, range(10, 250)))
        await service.until_live(1)
        service.step()
        (key,) = service.engine.computed
        assert service.engine.computed[key] == 64, "it is the first chunk of four"
        assert service.num_used_blocks
        call.cancel()
        await service.until_released()
        steps = service.step(MOST_STEPS)
        assert service.is_clean()
        assert steps <= MOST_STEPS
        assert service.engine.computed[key] == 64, "no later chunk was computed"
        assert not service.step(), "nothing is left to do"


async def test_case_03_cancel_after_the_first_token(one_slot: SteppedService) -> None:
    service = one_slot
    call = service.stub.Generate(request(LONG))
    await service.until_live(1)
    service.step()
    has_token = False
    while not has_token:
        message = await asyncio.wait_for(call.read(), TEST_TIMEOUT_S)
        assert isinstance(message, pb.GenerateResponse)
        has_token = bool(ids_of([message]))
    assert service.num_used_blocks
    call.cancel()
    await service.until_released()
    service.step(MOST_STEPS)
    assert service.is_clean()
    assert len(service.engine.cancelled) == 1, "the engine was told once"
    assert not service.step()
    # A released request may be released again: nothing is reported twice.
    assert service.server.num_live_requests == 0
    assert await call.code() is grpc.StatusCode.CANCELLED


def raced(engine: Engine, key: int, num_tokens: int, num_before: int) -> Completed | Failed:
    """Submit a request and cancel it after `num_before` iterations; return the event of its end."""
    engine.submit((make_spec(key, max_tokens=num_tokens),))
    ends: list[Completed | Failed] = []
    for turn in range(num_tokens + 8):
        if turn == num_before:
            engine.cancel(key)
        if engine.has_work:
            ends += engine.step().ends
    (end,) = ends
    assert end.key == key
    assert not engine.has_work
    assert engine.cache.pool.num_used == 0
    return end


def test_case_04_cancel_racing_completion_in_the_engine() -> None:
    """Requests are cancelled before, at and after their last iteration; each ends exactly once."""
    chance = random.Random(4)
    engines = [make_engine(make_info(pipeline_depth=depth))[0] for depth in (1, 2)]
    reasons: Counter[FinishReason] = Counter()
    for key in range(1, NUM_RACES + 1):
        num_tokens = chance.randint(1, 6)
        end = raced(chance.choice(engines), key, num_tokens, chance.randint(0, num_tokens + 3))
        assert isinstance(end, Completed)
        reasons[end.reason] += 1
        if key % 20 == 0:
            for engine in engines:
                engine.check_integrity()
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert min(reasons.values()) > NUM_RACES // 20, "both ends of the race were seen"


async def outcome(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_case_04_cancel_racing_completion_at_the_client(text: ModelText) -> None:
    chance = random.Random(5)
    codes: Counter[grpc.StatusCode] = Counter()
    async with stepped(text) as service:
        for _ in range(60):
            calls = [service.stub.Generate(request(4)) for _ in range(8)]
            readers = [asyncio.create_task(outcome(call)) for call in calls]
            await service.until_live(8)
            for call in calls:
                for _ in range(chance.randint(0, 12)):
                    service.step()
                    await asyncio.sleep(0)
                call.cancel()
            seen = await asyncio.wait_for(asyncio.gather(*readers), TEST_TIMEOUT_S)
            codes.update(seen)
            await service.until_released()
            await service.until(service.is_clean, steps=True)
            for call, code in zip(calls, seen, strict=True):
                assert await call.code() is code, "an end is final"
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_case_05_cancel_while_a_write_is_blocked(text: ModelText, how: str) -> None:
    """The blocked write raises CancelledError after a cancel of the call, and ExecuteBatchError
    after the loss of its connection.
    """
    config = FrontConfig(max_backlog_tokens=50_000, acceptance_delay_s=0.0)
    async with serving(text, config, channel_options=SMALL_WINDOW) as served:
        message = text_request()
        message.output.return_token_ids = True
        call = served.stub.Generate(message)
        key = await block_writer(served)
        if how == "cancel":
            call.cancel()
        else:
            await served.channel.close(None)
        assert await served.port.next_cancel() == ((key,), FinishReason.CANCELLED)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await until_true(lambda: not len(served.server.front.table))
        assert served.port.cancelled == [((key,), FinishReason.CANCELLED)]
        assert served.server.num_live_requests == 0
