"""Cases 12 to 14: the streams of a client that stops reading are closed; others are not
affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from chaos import attacks
from chaos import raw_http2 as h2
from chaos.attacked_server import attacked_server
from penstock.v1 import generation_service_pb2 as pb
from support.service import Stream
from support.timeout import TEST_TIMEOUT_S

NUM_TOKENS = 900
FEW_TOKENS_BYTES = 600
WATCH = "/grpc.health.v1.Health/Watch"
FAST = ("--simulated-config", '{"is_real_time": true, "cost": {"step_s": 0.002}}')


@pytest.mark.parametrize(
    ("limit", "word"),
    [
        (("--max-backlog-tokens", "256"), "tokens unread"),
        (("--max-reader-stall-s", "0.5"), "blocked for"),
    ],
)
async def test_case_12_the_stream_of_a_stopped_reader_is_closed(
    limit: tuple[str, str], word: str
) -> None:
    async with attacked_server(*FAST, *limit) as attacked:
        async with (
            attacked.service.channel() as channel,
            attacked.probed() as probe,
            h2.raw_connection(attacked.address, initial_window=FEW_TOKENS_BYTES) as connection,
        ):
            others = [Stream(channel, 200, first) for first in range(8)]
            data = attacks.request(4, max_tokens=NUM_TOKENS)
            await connection.send(h2.call(1, attacks.GENERATE, data))
            await attacked.service.until_logged("stalled reader disconnected", word)
            # Its connection stays open, but its slot and blocks are free.
            outcomes = await asyncio.gather(*(other.outcome() for other in others))
            assert outcomes == [grpc.StatusCode.OK] * 8
            assert all(other.num_tokens == 200 for other in others)
            assert not connection.is_closed
        assert probe.num_errors == 0
        await attacked.until_idle()


async def test_case_13_streams_with_a_zero_window_are_closed() -> None:
    options = ("--max-reader-stall-s", "0.5", "--max-num-seqs", "256", "--num-blocks", "20000")
    async with attacked_server(*options) as attacked:
        before_mib = attacked.rss_mib()
        async with attacks.zero_window_calls(attacked.address, 200):
            async with attacked.probed() as probe:
                # Half of them are streams, which are cut; the responses of the others are not read.
                await attacked.until(lambda stats: stats.models[0].totals.num_failed >= 100)
            # Their connection is still open.
            await attacked.until_no_request_is_live()
            assert attacked.rss_mib() - before_mib < 64
        assert probe.num_errors == 0
        await attacked.until_idle()


async def test_case_13_disconnection_without_reading_causes_no_error() -> None:
    async with attacked_server() as attacked:
        once = attacks.once_request(4)
        async with h2.raw_connection(attacked.address, initial_window=0) as connection:
            for stream in range(1, 40, 4):
                await connection.send(h2.call(stream, WATCH, b""))
                await connection.send(h2.call(stream + 2, attacks.ONCE, once))
            await attacked.until(lambda stats: stats.models[0].totals.num_completed >= 10)
        # An ERROR in the log is an error here.
        await attacked.until_idle()


async def test_case_14_a_slow_reader_that_returns_gets_everything() -> None:
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with attacked_server(*FAST) as attacked:
        reference, num_messages = await texts_of(attacked.service.channel(), None)
        slow = grpc.aio.insecure_channel(attacked.address, options=small)

        async def until_backlog() -> None:
            await attacked.until(lambda stats: stats.fronts[0].num_backlog_tokens > 50)

        text, num_coalesced = await texts_of(slow, until_backlog)
        assert text == reference
        assert num_coalesced < num_messages
        await attacked.until_idle()


async def texts_of(
    channel: grpc.aio.Channel, pause: Callable[[], Awaitable[None]] | None
) -> tuple[str, int]:
    """Return the text of one generation and its number of messages; await `pause` after the first
    message.
    """
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend([5, 6, 7, 8])
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = NUM_TOKENS
    message.stopping.ignore_eos = True
    message.output.return_token_ids = True  # makes messages large
    texts: list[str] = []
    async with channel, asyncio.timeout(TEST_TIMEOUT_S):
        call = channel.unary_stream(
            attacks.GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )(message)
        async for response in call:
            if response.WhichOneof("event") == "tokens":
                texts.append(response.tokens.text)
            if pause is not None and len(texts) == 1:
                await pause()
    return "".join(texts), len(texts)
