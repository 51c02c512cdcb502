"""The streams of clients that do not read are closed, and their requests in the engine are
cancelled.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.core import FakeClock
from support.fronts import (
    SMALL_WINDOW,
    ServedFront,
    block_writer,
    collect,
    rich_error,
    serving,
    text_of,
)
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S, until_true

MANY_TOKENS = 60_000


async def flood(served: ServedFront, key: int, num_tokens: int) -> None:
    """Report tokens until the request has ended or `num_tokens` are reported; run an iteration of
    the event loop after every 8 tokens.
    """
    token_id = served.encode("a")[0]
    for _ in range(num_tokens // 8):
        if served.server.front.table.output(key) is None:
            return
        served.port.emit(tokens=[(key, token_id)] * 8)
        await asyncio.sleep(0)


def request(request_id: str | None = None) -> pb.GenerateRequest:
    message = text_request(request_id=request_id)
    # Token records make messages large, so that the window fills soon.
    message.output.return_token_ids = True
    return message


async def test_a_backlog_beyond_the_limit_closes_the_stream(
    text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    config = FrontConfig(max_backlog_tokens=2000, acceptance_delay_s=0.0)
    async with serving(text, config, channel_options=SMALL_WINDOW) as served:
        call = served.stub.Generate(request("slow"))
        key = await block_writer(served)
        healthy = served.stub.Generate(request())
        (other,) = await served.port.next_submission()
        await flood(served, key, MANY_TOKENS)
        keys, reason = await served.port.next_cancel()
        assert (keys, reason) == ((key,), FinishReason.CANCELLED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.info.reason == "READER_STALLED"
        assert served.server.front.counters.num_disconnected_readers == 1
        (line,) = (record.getMessage() for record in caplog.records)
        assert "slow" in line
        assert "tokens unread" in line
        served.port.send(other.key, served.encode("fine"))
        served.port.finish(other.key)
        assert text_of([response async for response in healthy]) == "fine"
        assert served.server.num_live_requests == 0


async def test_a_write_that_takes_too_long_closes_the_stream(
    text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(1000.0)
    config = FrontConfig(max_reader_stall_s=5.0, acceptance_delay_s=0.0)
    async with serving(text, config, channel_options=SMALL_WINDOW, clock=clock) as served:
        call = served.stub.Generate(request("slow"))
        key = await block_writer(served)
        front = served.server.front
        front.disconnect_stalled()
        assert front.counters.num_disconnected_readers == 0, "not stalled long enough"
        clock.now_s += 5.1
        front.disconnect_stalled()
        (line,) = (record.getMessage() for record in caplog.records)
        assert "slow" in line
        assert "blocked for 5.1 s" in line
        assert await served.port.next_cancel() == ((key,), FinishReason.CANCELLED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert rich_error(caught.value).info.reason == "READER_STALLED"


async def test_an_unread_final_event_closes_the_stream(text: ModelText) -> None:
    clock = FakeClock(1000.0)
    config = FrontConfig(max_reader_stall_s=5.0, acceptance_delay_s=0.0)
    async with serving(text, config, channel_options=SMALL_WINDOW, clock=clock) as served:
        call = served.stub.Generate(request())
        key = await block_writer(served)
        served.port.finish(key)
        clock.now_s += 5.1
        served.server.front.disconnect_stalled()
        assert served.server.front.counters.num_disconnected_readers == 1
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await until_true(lambda: not len(served.server.front.table))
        call.cancel()


async def test_a_reader_that_returns_gets_everything_coalesced(text: ModelText) -> None:
    async with serving(text, channel_options=SMALL_WINDOW) as served:
        call = served.stub.Generate(request())
        key = await block_writer(served)
        served.port.finish(key)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            responses = [response async for response in call]
        end = responses[-1].finished.outputs[0]
        assert text_of(responses) == "a" * end.num_completion_tokens
        assert max(response.tokens.num_tokens for response in responses) > 10
        assert [r.sequence for r in responses] == list(range(len(responses)))
        assert max(response.ByteSize() for response in responses) <= 1100
