"""Calls with one request each, to a front that records every request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import PATIENCE_S, ServedFront, queued, serving
from support.record_log import RecordLog

SERVICE = "penstock.v1.GenerationService"
STYLES = ("Generate", "GenerateOnce")


@contextlib.asynccontextmanager
async def logged(
    text: ModelText, config: FrontConfig | None = None, **options: Any
) -> AsyncGenerator[tuple[ServedFront, RecordLog]]:
    log = RecordLog()
    options.setdefault("is_tracing", True)
    async with serving(text, config, recorder=log.recorder, **options) as served:
        served.port.is_answering = True
        yield served, log
    assert log.recorder.dropped_records == {}


def request(prompt: str = "hello", **fields: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**fields)
    message.text_prompt.text = prompt
    return message


class Call:
    """A call of either style: `Generate` is read to its end, `GenerateOnce` awaited.

    `trace_id`: of the accepted event, once it was read.
    """

    def __init__(
        self, served: ServedFront, style: str, message: pb.GenerateRequest | bytes, **options: Any
    ) -> None:
        data: Any = message
        if isinstance(message, pb.GenerateRequest):
            if style == "GenerateOnce":
                data = pb.GenerateOnceRequest(generation=message).SerializeToString()
            else:
                data = message.SerializeToString()
        factory = served.channel.unary_stream if style == "Generate" else served.channel.unary_unary
        self.trace_id = ""
        self.call: Any = factory(f"/{SERVICE}/{style}")(data, **options)

    async def end(self) -> grpc.StatusCode:
        async with asyncio.timeout(PATIENCE_S):
            code: grpc.StatusCode = await self.call.code()
        return code

    async def drained(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE_S):
                if hasattr(self.call, "read"):
                    while (data := await self.call.read()) is not grpc.aio.EOF:
                        accepted = pb.GenerateResponse.FromString(data).accepted
                        self.trace_id = accepted.trace_id or self.trace_id
                else:
                    await self.call
        return await self.end()


async def run_to_end(served: ServedFront, key: int) -> None:
    served.port.say(changes=[queued(key, 3, 0.25)])
    served.port.admit(key, num_cached_tokens=2)
    served.port.send(key, served.encode("abc"))
    served.port.finish(key)


async def submitted(served: ServedFront) -> int:
    (spec, *_) = await served.port.next_submission()
    return spec.key
