"""Relays the gRPC calls that a replica received from Serve to the replica's service.

Relays the metadata, the messages, cancellation, and the final status with its trailers. Messages
are passed as bytes and are not parsed. Does not use Serve.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from penstock.gateway.ray.methods import Method

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

# Metadata that is meant for Serve, or concerns the connection to Serve.
_NOT_FORWARDED = frozenset(
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
class CallStatus:
    """The status with which a call ended.

    `trailers` has the headers of the call and its trailers, because Serve cannot send headers.
    """

    code: grpc.StatusCode
    message: str
    trailers: Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryResult:
    """The result of a unary call: the response (empty if the call failed) and the status."""

    data: bytes
    status: CallStatus


def forwarded_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """Return the part of the caller's metadata that is forwarded to the service: without the
    entries for Serve, gRPC and HTTP/2."""
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _NOT_FORWARDED and not key.startswith((":", "grpc-"))
    )


class Relay:
    """Makes calls to one service at `address`. Must be created on the event loop that uses it."""

    def __init__(self, address: str) -> None:
        # Its methods get their types from serializers, which bytes do not need.
        self._channel: Any = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def close(self) -> None:
        """Close the connection. This cancels open calls."""
        await self._channel.close()

    async def unary(self, method: Method, data: bytes, metadata: Metadata) -> UnaryResult:
        """Make a call with one message in each direction; return the response and the status. A
        failed call raises no exception."""
        call = self._channel.unary_unary(method.path)(data, metadata=metadata)
        try:
            result: bytes = await call
        except grpc.aio.AioRpcError:
            result = b""
        return UnaryResult(data=result, status=await _status_of(call))

    async def stream(
        self, method: Method, data: bytes, metadata: Metadata
    ) -> AsyncGenerator[bytes | CallStatus]:
        """Make a call with one message. Yield its responses, and then its `CallStatus`.

        Closing the generator cancels the call.
        """
        call = self._channel.unary_stream(method.path)(data, metadata=metadata)
        async with contextlib.aclosing(_received(call)) as received:
            async for item in received:
                yield item

    async def bidirectional(
        self, method: Method, requests: AsyncIterator[bytes], metadata: Metadata
    ) -> AsyncGenerator[bytes | CallStatus]:
        """Make a call with messages in both directions. Yield the same items as `stream`.

        The end of `requests` closes only that direction. An exception in it cancels the call; the
        last item is then a `CallStatus` with CANCELLED.
        """
        call = self._channel.stream_stream(method.path)(metadata=metadata)
        writer = asyncio.create_task(_send(call, requests))
        try:
            async with contextlib.aclosing(_received(call)) as received:
                async for item in received:
                    yield item
        except asyncio.CancelledError:
            # Either the reader of this generator is cancelled, or the writer has cancelled the
            # call.
            failure = _failure_of(writer)
            if failure is None:
                raise
            message = f"the caller's messages cannot be read: {type(failure).__name__}"
            yield CallStatus(code=grpc.StatusCode.CANCELLED, message=message, trailers=())
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
        return  # The call has ended, and its reader raises the status.
    except BaseException:
        # Cancel, because otherwise the caller would seem to have sent all messages.
        call.cancel()
        raise


def _failure_of(writer: "asyncio.Task[None]") -> BaseException | None:
    if not writer.done() or writer.cancelled():
        return None
    return writer.exception()


async def _received(call: Any) -> AsyncGenerator[bytes | CallStatus]:
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (data := await call.read()) is not grpc.aio.EOF:
                yield data
        yield await _status_of(call)
    finally:
        call.cancel()  # Has no effect on a call that has ended.


async def _status_of(call: Any) -> CallStatus:
    headers = tuple(await call.initial_metadata() or ())
    trailers = tuple(await call.trailing_metadata() or ())
    code: grpc.StatusCode = await call.code()
    return CallStatus(code=code, message=await call.details() or "", trailers=headers + trailers)
