"""Cases 9 and 11: a deadline ends a request at the client and in the engine, whether or not the
client sets one.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from support.fronts import rich_error
from support.stepped_service import request, stepped
from support.timeout import TEST_TIMEOUT_S

LONG = 400
MOST_STEPS = 2


async def test_case_09_deadline_while_the_engine_sleeps(text: ModelText) -> None:
    """No step runs when the deadline passes: gRPC ends the call, and the blocks are freed in the
    next step.
    """
    async with stepped(text) as service:
        call = service.stub.Generate(request(LONG), timeout=4.0)
        await service.until_live(1)
        service.step()
        assert service.num_used_blocks
        await service.until_released()
        assert (
            await asyncio.wait_for(call.code(), TEST_TIMEOUT_S) is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        service.step(MOST_STEPS)
        assert service.is_clean()


async def test_case_11_the_servers_default_deadline(text: ModelText) -> None:
    now_s = 1000.0
    config = FrontConfig(default_deadline_s=2.0, acceptance_delay_s=0.0)
    async with stepped(text, front=config, clock=lambda: now_s) as service:
        call = service.stub.Generate(request(LONG))
        await service.until_live(1)
        service.step(3)
        (live,) = service.engine.requests.values()
        assert live.spec.deadline_s == pytest.approx(now_s + 2.0)
        now_s += 1.9
        assert service.step(3) == 3, "not yet"
        now_s += 0.2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.info.metadata["deadline"] == "server"
        await service.until_released()
        assert service.is_clean()
