"""The server closes streams of clients that do not read, without a request to do so."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import PATIENCE_S, collect, rich_error, serving

# A stream window as small as the protocol's default, and no growing of it.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


async def test_a_stalled_reader_is_cut_by_the_server_itself(text: ModelText) -> None:
    # However much is unread: only the time that a write takes can cut this stream.
    config = FrontConfig(max_reader_stall_s=0.2, max_backlog_tokens=10**9, acceptance_delay_s=0.0)
    async with serving(text, config, channel_options=SMALL_WINDOW) as served:
        message = pb.GenerateRequest()
        message.text_prompt.text = "hello"
        message.output.return_token_ids = True  # makes messages large
        call = served.stub.Generate(message)
        (spec,) = await served.port.next_submission()
        served.port.admit(spec.key)
        token_id = served.encode("a")[0]
        async with asyncio.timeout(PATIENCE_S):
            while not served.port.cancelled:
                served.port.say(tokens=[(spec.key, token_id)] * 8)
                await asyncio.sleep(0)
        assert served.port.cancelled == [((spec.key,), FinishReason.CANCELLED)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.info.reason == "READER_STALLED"
