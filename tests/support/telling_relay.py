"""A gRPC server between a gateway and a worker: it passes all on unchanged and keeps what it saw.

Owns the transport, bytes in and bytes out whatever the method, and the record of the calls. What
the bytes mean it does not know.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

_OWN_KEYS = ("user-agent",)
"""Each of the two connections has its own."""


@dataclass(slots=True)
class Call:
    """One call: its method, the caller's metadata and deadline, and the messages both ways.

    `left_s`: seconds until the deadline when it came, None where there was none.
    """

    method: str
    metadata: dict[str, str | bytes]
    left_s: float | None
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)


class TellingRelay(grpc.GenericRpcHandler):
    """`calls`: all that came, in order. While it `is_shut` all are refused with UNAVAILABLE."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.address = ""
        self.calls: list[Call] = []
        self.is_shut = False

    def to(self, method: str) -> list[Call]:
        """The calls of one method, by its last name."""
        return [call for call in self.calls if call.method.endswith(f"/{method}")]

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._forward, method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        metadata = [pair for pair in context.invocation_metadata() if pair[0] not in _OWN_KEYS]
        left_s = context.time_remaining()
        # A call without a deadline is stated to have the longest one there is.
        seen = Call(method, dict(metadata), left_s if left_s and left_s < 1e6 else None)
        self.calls.append(seen)
        if self.is_shut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "shut")

        async def kept() -> AsyncIterator[bytes]:
            async for request in requests:
                seen.requests.append(request)
                yield request

        stub: Any = self._channel.stream_stream(method)
        call = stub(kept(), timeout=seen.left_s, metadata=metadata)
        try:
            async for answer in call:
                seen.answers.append(answer)
                yield answer
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "")
        except asyncio.CancelledError:
            call.cancel()
            raise


@asynccontextmanager
async def telling_relay(address: str) -> AsyncGenerator[TellingRelay]:
    """A relay to the service at `address`; `relay.address` is its own."""
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        relay = TellingRelay(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((relay,))
        port = server.add_insecure_port("127.0.0.1:0")
        relay.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield relay
        finally:
            await server.stop(0)
