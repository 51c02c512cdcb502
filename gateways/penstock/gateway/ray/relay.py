"""Relays a replica's calls to the replica's own service.

Owns what is relayed: messages as bytes, metadata, cancellation, and how the call ended, with its
trailers. Independent of Serve and of the content of messages.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from penstock.gateway.ray.methods import Method

Pairs: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

# Metadata for Serve, or about the connection to Serve, of no use to the service.
_NOT_PASSED = frozenset(
    {"application", "multiplexed_model_id", "request_id", "session_id", "user-agent", "te"}
)
_OPTIONS = (
    # The service has its own limits.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a call ended. `trailers` includes its headers, which Serve cannot send."""

    code: grpc.StatusCode
    message: str
    trailers: Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a unary call: its message, empty if it failed, and its end."""

    data: bytes
    ending: Ending


def passed_on(metadata: Iterable[tuple[str, str | bytes]]) -> Pairs:
    """Return the part of a caller's metadata that is passed to the service."""
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _NOT_PASSED and not key.startswith((":", "grpc-"))
    )


class Relay:
    """Makes calls to one service at `address`. Create it on its event loop."""

    def __init__(self, address: str) -> None:
        # Its methods are typed by serializers, and bytes need none.
        self._channel: Any = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def close(self) -> None:
        """Close the connection and its open calls."""
        await self._channel.close()

    async def unary(self, method: Method, data: bytes, metadata: Pairs) -> Answer:
        """Make a call with one message in each direction."""
        call = self._channel.unary_unary(method.path)(data, metadata=metadata)
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError:
            answer = b""
        return Answer(data=answer, ending=await _ending(call))

    async def stream(
        self, method: Method, data: bytes, metadata: Pairs
    ) -> AsyncGenerator[bytes | Ending]:
        """Make a call with one message; yield its responses, and its ending as the last item.

        Closing the generator cancels the call.
        """
        call = self._channel.unary_stream(method.path)(data, metadata=metadata)
        async with contextlib.aclosing(_received(call)) as received:
            async for item in received:
                yield item

    async def dialogue(
        self, method: Method, requests: AsyncIterator[bytes], metadata: Pairs
    ) -> AsyncGenerator[bytes | Ending]:
        """Make a call as `stream` does, with messages in both directions. The end of `requests`
        closes only that direction.
        """
        call = self._channel.stream_stream(method.path)(metadata=metadata)
        writer = asyncio.create_task(_send(call, requests))
        try:
            async with contextlib.aclosing(_received(call)) as received:
                async for item in received:
                    yield item
        except asyncio.CancelledError:
            # Either the reader of this generator is cancelled, or the writer cancelled the call.
            failure = _failure_of(writer)
            if failure is None:
                raise
            message = f"the caller's messages cannot be read: {type(failure).__name__}"
            yield Ending(code=grpc.StatusCode.CANCELLED, message=message, trailers=())
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            _failure_of(writer)


async def _send(call: Any, requests: AsyncIterator[bytes]) -> None:
    try:
        async for data in requests:
            await call.write(data)
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return  # the call is over; its reader raises the status
    except BaseException:
        # Cancel, so that it does not look as if the caller had sent everything.
        call.cancel()
        raise


def _failure_of(writer: "asyncio.Task[None]") -> BaseException | None:
    if not writer.done() or writer.cancelled():
        return None
    return writer.exception()


async def _received(call: Any) -> AsyncGenerator[bytes | Ending]:
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (data := await call.read()) is not grpc.aio.EOF:
                yield data
        yield await _ending(call)
    finally:
        call.cancel()  # does nothing to a call that has ended


async def _ending(call: Any) -> Ending:
    headers = tuple(await call.initial_metadata() or ())
    trailers = tuple(await call.trailing_metadata() or ())
    code: grpc.StatusCode = await call.code()
    return Ending(code=code, message=await call.details() or "", trailers=headers + trailers)
