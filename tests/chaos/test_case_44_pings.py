"""Case 44: a client that pings too often is disconnected; one that pings as documented is not."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from chaos import raw_http2 as h2
from chaos.attacked_server import attacked_server
from penstock.server.rpc.options import KeepaliveConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.fronts import collect, serving, text_of

EVERY_SECOND = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


async def test_case_44_a_client_that_pings_too_often_is_disconnected() -> None:
    async with (
        attacked_server() as attacked,
        attacked.probed() as probe,
        h2.raw_connection(attacked.address) as connection,
    ):
        # Each is answered before the next is sent: not a flood, but far too many.
        for _ in range(10):
            await connection.until_received()
        await connection.until_closed()
        assert connection.goaway == h2.ENHANCE_YOUR_CALM
        assert connection.goaway_text == b"too_many_pings"
    assert probe.num_errors == 0


async def test_case_44_the_documented_ping_interval_is_enforced(text: ModelText) -> None:
    tolerant = KeepaliveConfig(min_client_ping_interval_s=0.05)
    async with (
        serving(text) as strict_front,
        serving(text, keepalive=tolerant) as tolerant_front,
        grpc.aio.insecure_channel(strict_front.address, options=EVERY_SECOND) as one,
        grpc.aio.insecure_channel(tolerant_front.address, options=EVERY_SECOND) as other,
    ):
        message = pb.GenerateRequest()
        message.text_prompt.text = "hello"
        turned_out = pb_grpc.GenerationServiceStub(one).Generate(message)
        kept = pb_grpc.GenerationServiceStub(other).Generate(message)
        (spec,) = await tolerant_front.port.next_submission()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(turned_out)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping" in (caught.value.details() or "").lower()
        # It has pinged as often, and its stream continues.
        tolerant_front.port.send(spec.key, tolerant_front.encode("fine"))
        tolerant_front.port.finish(spec.key)
        assert text_of(await collect(kept)) == "fine"
