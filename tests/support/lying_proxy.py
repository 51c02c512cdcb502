"""A gRPC server that passes everything on to a real service, but for what a test makes it change.

Owns the transport: bytes in, bytes out, whatever the method. A lie is reported about Generate
alone.
"""

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

import penstock.v1 as pb

GENERATE = "/penstock.v1.GenerationService/Generate"


def _as_it_is(_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What becomes of a request on the way in, and of each response on the way out."""

    request: Callable[[pb.GenerateRequest], None] = _as_it_is
    response: Callable[[pb.GenerateResponse], None] = _as_it_is


class LyingProxy(grpc.GenericRpcHandler):
    """`lie` may be exchanged between calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.lie = Lie()
        self.address = ""

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._forward, method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        lie = self.lie

        async def changed() -> AsyncIterator[bytes]:
            async for request in requests:
                yield _change(pb.GenerateRequest, lie.request, request, method)

        left_s = context.time_remaining()
        # A call without a deadline is stated to have the longest one there is.
        timeout_s = left_s if left_s is not None and left_s < 1e6 else None
        stub: Any = self._channel.stream_stream(method)
        call = stub(changed(), timeout=timeout_s)
        try:
            async for response in call:
                yield _change(pb.GenerateResponse, lie.response, response, method)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        finally:
            call.cancel()


def _change(message_type: Any, change: Callable[[Any], None], data: bytes, method: str) -> bytes:
    if method != GENERATE:
        return data
    message = message_type.FromString(data)
    change(message)
    changed: bytes = message.SerializeToString()
    return changed


@asynccontextmanager
async def lying_proxy(address: str) -> AsyncGenerator[LyingProxy, None]:
    """Serve on 127.0.0.1 for the length of the block, for the service at the address."""
    async with grpc.aio.insecure_channel(address) as channel:
        proxy = LyingProxy(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((proxy,))
        proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            await server.stop(None)
