"""Calls that are only begun: their metadata has a bound, their message must arrive in time, and
be a message.

Owns the taking of the one message of a call, for every service alike, those that come with gRPC
included. gRPC by itself waits for it as long as the connection lives, so that a client could hold
any number of half-open calls; and it answers malformed bytes with UNKNOWN and the name of a class.
It bounds metadata only once a client has acknowledged the settings that say so.

On the wire a method that takes one message is no different from one that takes a stream of them.
So each is served as a stream here, of which one message is read.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.server.front.errors import ErrorReason, Refusal
from penstock.server.rpc.options import MAX_ANY_METADATA_BYTES
from penstock.server.rpc.reflection import HandlerHouse
from penstock.server.rpc.statuses import abort_of

_MALFORMED = Refusal(reason=ErrorReason.MALFORMED_REQUEST)
_NO_MESSAGE = Refusal(reason=ErrorReason.MALFORMED_REQUEST, message="the call has no message")


class TimelyServer:
    """Stands in for a server where handlers are added. `max_arrival_s`: see `TransportConfig`."""

    def __init__(self, server: HandlerHouse, *, max_arrival_s: float) -> None:
        self._server = server
        self._max_arrival_s = max_arrival_s

    def add_generic_rpc_handlers(self, handlers: "Iterable[grpc.GenericRpcHandler]", /) -> None:
        """As the server's own."""
        self._server.add_generic_rpc_handlers(
            tuple(_TimelyHandler(one, self._max_arrival_s) for one in handlers)
        )

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """The same handlers once more, for servers that know methods in advance: not needed."""


class _TimelyHandler(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, max_arrival_s: float) -> None:
        self._inner = inner
        self._max_arrival_s = max_arrival_s
        # Bounded by the methods there are.
        self._made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The method, if it is one of these."""
        if _metadata_bytes(handler_call_details.invocation_metadata) > MAX_ANY_METADATA_BYTES:
            return _REFUSE_METADATA
        path = handler_call_details.method
        made = self._made.get(path)
        if made is None:
            found = self._inner.service(handler_call_details)
            if found is None:
                return None
            made = self._made[path] = _timely(found, self._max_arrival_s)
        return made


def _metadata_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """What HTTP/2 counts as the size of a list of headers (RFC 9113, 6.5.2), as near as needed."""
    return sum(len(key) + len(value) + 32 for key, value in metadata)


async def _refuse_metadata(requests: object, context: Any) -> None:
    del requests
    try:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the metadata is too large")
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


_REFUSE_METADATA: "grpc.RpcMethodHandler[Any, Any]" = grpc.stream_stream_rpc_method_handler(
    cast(Any, _refuse_metadata)
)


def _timely(
    found: "grpc.RpcMethodHandler[Any, Any]", max_arrival_s: float
) -> "grpc.RpcMethodHandler[Any, Any]":
    parse = _parser(found.request_deserializer)
    if found.request_streaming:
        if found.request_deserializer is None:
            return found
        behaviour: Any = found.stream_stream
        return grpc.stream_stream_rpc_method_handler(
            _parsed_stream(behaviour, parse),
            response_serializer=found.response_serializer,
        )
    if found.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _one_then_stream(cast(Any, found.unary_stream), parse, max_arrival_s),
            response_serializer=found.response_serializer,
        )
    return grpc.stream_unary_rpc_method_handler(
        _one_then_one(cast(Any, found.unary_unary), parse, max_arrival_s),
        response_serializer=found.response_serializer,
    )


def _one_then_one(behaviour: Any, parse: Callable[[bytes], Any], max_arrival_s: float) -> Any:
    async def handle(requests: object, context: Any) -> Any:
        del requests
        return await behaviour(await _message(context, parse, max_arrival_s), context)

    return handle


def _one_then_stream(behaviour: Any, parse: Callable[[bytes], Any], max_arrival_s: float) -> Any:
    async def handle(requests: object, context: Any) -> None:
        del requests
        await behaviour(await _message(context, parse, max_arrival_s), context)

    if inspect.iscoroutinefunction(behaviour):
        return handle
    raise TypeError("a stream of responses is written by its handler")


def _parsed_stream(behaviour: Any, parse: Callable[[bytes], Any]) -> Any:
    async def messages(context: Any) -> AsyncIterator[Any]:
        while (data := await context.read()) is not grpc.aio.EOF:
            yield await _parsed(data, context, parse)

    async def handle(requests: object, context: Any) -> AsyncIterator[Any]:
        del requests
        async for response in behaviour(messages(context), context):
            yield response

    return handle


async def _message(context: Any, parse: Callable[[bytes], Any], max_arrival_s: float) -> Any:
    """The message of a call; where there is none, the call ends here."""
    try:
        async with asyncio.timeout(max_arrival_s):
            data = await context.read()
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
    except TimeoutError:
        late = f"the message of the call did not arrive within {max_arrival_s:g} s"
        await _abort(context, Refusal(reason=ErrorReason.DEADLINE_EXCEEDED, message=late))
    if data is grpc.aio.EOF:
        await _abort(context, _NO_MESSAGE)
    return await _parsed(data, context, parse)


async def _parsed(data: bytes, context: Any, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await _abort(context, _MALFORMED)


async def _abort(context: Any, refusal: Refusal) -> NoReturn:
    abort = abort_of(refusal)
    try:
        await context.abort(abort.code, abort.message, abort.trailers)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        # The peer is gone, or the core has refused its message already: nobody is to be told.
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


def _parser(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    return _as_it_is if deserializer is None else deserializer


def _as_it_is(data: bytes) -> bytes:
    return data
