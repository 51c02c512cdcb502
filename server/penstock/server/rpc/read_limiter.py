"""Limits the reading of request messages.

Callers are authenticated first, metadata is limited, and a message must arrive in time and be
valid. This applies to all services, including gRPC's own services (health, reflection, channelz).
gRPC waits for the message as long as the connection lives, so that a client could hold any number
of half-open calls. It also reports malformed bytes as UNKNOWN with the name of a class, and limits
metadata only after a client has acknowledged its settings.

In HTTP/2, a method with one request message does not differ from a method with a request stream.
Therefore methods with one request message are served here as methods with a request stream, and one
message is read.

A message takes memory while it arrives. Nothing is read from a caller that is not permitted to make
the call; the handler receives the error, a `Failure`, instead of the message. Other reads are
limited (`reading_slots.py`). Callers are checked only here, and in Multiplex for each request;
handlers receive the caller with the message. A handler without a request deserialiser belongs to
Penstock and takes bytes; the handlers of gRPC's services take deserialised messages.
"""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from penstock.server.front.errors import ErrorReason, Failure, RequestError
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import AdmittedCall
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageQueue
from penstock.server.rpc.options import MAX_ANY_METADATA_BYTES, MAX_MESSAGE_BYTES
from penstock.server.rpc.reading_slots import ReadingSlots
from penstock.server.rpc.reflection import HandlerRegistry
from penstock.server.rpc.statuses import abort_of
from penstock.server.security.rights import Caller, Right
from penstock.server.tenants import NO_TENANT, PriorityCeilings

R = TypeVar("R")
_MALFORMED = Failure(reason=ErrorReason.MALFORMED_REQUEST)
_NO_MESSAGE = Failure(reason=ErrorReason.MALFORMED_REQUEST, message="the call has no message")
_TOO_LARGE = Failure(
    reason=ErrorReason.MALFORMED_REQUEST, message="the message is too large for this method"
)
_MAX_READS: Final = 64
_MAX_READS_PER_CALLER: Final = 4
_YIELD_AFTER_S: Final = 2.0
"""Limits on messages of a few MiB that are read at the same time: in total, per caller, and how
long a slot is held while others wait, in seconds.

A message that has arrived is read within two iterations of the event loop, so callers rarely wait.
A large message holds its slot until it may be handled (`large_messages.py`).
"""
MAX_UNAUTHENTICATED_READS: Final = 16
_MAX_UNAUTHENTICATED_READS_PER_CALLER: Final = 4
_MAX_UNAUTHENTICATED_BYTES: Final = 4096
_UNAUTHENTICATED_YIELD_AFTER_S: Final = 0.25
"""The same limits for methods without authentication, whose message is only the name of a
service."""
_UNAUTHENTICATED: Final = Caller(
    tenant=NO_TENANT, rights=frozenset(), ceilings=PriorityCeilings(0, 0)
)
"""The caller of a method that needs no right and does not authenticate."""


class _CallCount:
    """Counts the active calls of a group of methods, and limits them to `max_num`."""

    def __init__(self, max_num: float) -> None:
        self._max_num = max_num
        self._num = 0

    async def start_call(self, context: Any) -> None:
        """Count a call. Aborts it with RESOURCE_EXHAUSTED if `max_num` calls are active."""
        if self._num >= self._max_num:
            await _exhausted(context, "too many calls at a time")
        self._num += 1

    def end_call(self) -> None:
        """Remove an ended call from the count."""
        self._num -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _MethodPolicy:
    """How the messages of one method are read.

    `right`: see `AccessControl.right_of`. Several methods share the same `slots` and `calls`.
    `is_ours` is True for Penstock's own handlers; they take bytes.
    """

    path: str
    right: Right | None
    access: AccessControl
    slots: ReadingSlots
    calls: _CallCount
    large_messages: LargeMessageQueue
    max_arrival_s: float
    max_stall_s: float
    max_message_bytes: int
    parse: Callable[[bytes], Any]
    is_ours: bool


class RequestReadLimiter:
    """Adds handlers to `server`, wrapped so that the reading of their messages is limited.

    Args:
        max_arrival_s: See `TransportConfig`.
        max_stall_s: How long one write of a bidirectional method of gRPC itself (reflection)
            may block, in seconds.
        access: Authorises callers.
        max_calls: Maximum number of active calls. Calls of methods without authentication have a
            separate limit of the same value.
        large_messages: The queue of large messages; if it is None, a new one is created.
    """

    def __init__(
        self,
        server: HandlerRegistry,
        access: AccessControl,
        *,
        max_arrival_s: float,
        max_stall_s: float,
        max_calls: float = math.inf,
        large_messages: LargeMessageQueue | None = None,
    ) -> None:
        self._calls, self._unauthenticated_calls = _CallCount(max_calls), _CallCount(max_calls)
        self._large_messages = large_messages or LargeMessageQueue()
        self._server = server
        self._access = access
        self._max_arrival_s = max_arrival_s
        self._max_stall_s = max_stall_s
        self._slots = ReadingSlots(
            max_num=_MAX_READS,
            max_per_caller=_MAX_READS_PER_CALLER,
            yield_after_s=_YIELD_AFTER_S,
        )
        self._unauthenticated_slots = ReadingSlots(
            max_num=MAX_UNAUTHENTICATED_READS,
            max_per_caller=_MAX_UNAUTHENTICATED_READS_PER_CALLER,
            yield_after_s=_UNAUTHENTICATED_YIELD_AFTER_S,
        )

    def add_generic_rpc_handlers(self, handlers: "Iterable[grpc.GenericRpcHandler]", /) -> None:
        """Wrap handlers and add them to the server."""
        self._server.add_generic_rpc_handlers(
            tuple(_LimitedHandler(one, self._policy_of) for one in handlers)
        )

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Do nothing, because generated code registers the same handlers a second time, by method
        name."""

    def _policy_of(self, path: str, found: "grpc.RpcMethodHandler[Any, Any]") -> _MethodPolicy:
        right = self._access.right_of(path)
        is_unauthenticated = right is None
        return _MethodPolicy(
            path=path,
            right=right,
            access=self._access,
            slots=self._unauthenticated_slots if is_unauthenticated else self._slots,
            calls=self._unauthenticated_calls if is_unauthenticated else self._calls,
            large_messages=self._large_messages,
            max_arrival_s=self._max_arrival_s,
            max_stall_s=self._max_stall_s,
            max_message_bytes=_MAX_UNAUTHENTICATED_BYTES
            if is_unauthenticated
            else MAX_MESSAGE_BYTES,
            parse=found.request_deserializer or _identity,
            is_ours=found.request_deserializer is None,
        )


PolicyOf = Callable[[str, "grpc.RpcMethodHandler[Any, Any]"], _MethodPolicy]


class _LimitedHandler(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, policy_of: PolicyOf) -> None:
        self._inner = inner
        self._policy_of = policy_of
        # Limited by the number of methods.
        self._made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the wrapped handler of the called method; None if `inner` does not serve it.

        A call with too much metadata gets a handler that rejects it.
        """
        if _metadata_bytes(handler_call_details.invocation_metadata) > MAX_ANY_METADATA_BYTES:
            return _REJECT_METADATA
        path = handler_call_details.method
        made = self._made.get(path)
        if made is None:
            found = self._inner.service(handler_call_details)
            if found is None:
                return None
            made = self._made[path] = _limited(found, self._policy_of(path, found))
        return made


def _metadata_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """Return the approximate size of a header list as HTTP/2 defines it (RFC 9113, 6.5.2)."""
    return sum(len(key) + len(value) + 32 for key, value in metadata)


async def _reject_metadata(requests: object, context: Any) -> None:
    del requests
    await _exhausted(context, "the metadata is too large")


async def _exhausted(context: Any, what: str) -> NoReturn:
    try:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


_REJECT_METADATA: "grpc.RpcMethodHandler[Any, Any]" = grpc.stream_stream_rpc_method_handler(
    cast(Any, _reject_metadata)
)


def _limited(
    found: "grpc.RpcMethodHandler[Any, Any]", policy: _MethodPolicy
) -> "grpc.RpcMethodHandler[Any, Any]":
    if found.request_streaming:
        # Penstock's own streams read their messages themselves.
        if policy.is_ours:
            return found
        write_as = cast("Callable[[Any], bytes]", found.response_serializer)
        return grpc.stream_stream_rpc_method_handler(
            _parsed_stream(cast(Any, found.stream_stream), policy, write_as)
        )
    if found.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _stream_response_handler(cast(Any, found.unary_stream), policy),
            response_serializer=found.response_serializer,
        )
    return grpc.stream_unary_rpc_method_handler(
        _unary_response_handler(cast(Any, found.unary_unary), policy),
        response_serializer=found.response_serializer,
    )


def _unary_response_handler(behaviour: Any, policy: _MethodPolicy) -> Any:
    async def handle(requests: object, context: Any) -> Any:
        del requests
        return await _until_disconnect(_serve(behaviour, context, policy))

    return handle


def _stream_response_handler(behaviour: Any, policy: _MethodPolicy) -> Any:
    async def handle(requests: object, context: Any) -> None:
        del requests
        await _until_disconnect(_serve(behaviour, context, policy))

    if inspect.iscoroutinefunction(behaviour):
        return handle
    raise TypeError("a stream of responses is written by its handler")


def _parsed_stream(behaviour: Any, policy: _MethodPolicy, write_as: Callable[[Any], bytes]) -> Any:
    """Wrap a bidirectional method of a gRPC service. Only the first message has a time limit. Each
    write may block for `max_stall_s`; then the call is cancelled."""

    async def messages(context: Any) -> AsyncIterator[Any]:
        data = await _read_first(context, policy, context.peer())
        while data is not grpc.aio.EOF:
            yield await _parsed(data, context, policy)
            data = await context.read()

    async def serve(context: Any) -> None:
        async for response in behaviour(messages(context), context):
            try:
                async with asyncio.timeout(policy.max_stall_s):
                    await context.write(write_as(response))
            except TimeoutError:
                # A stream that is blocked by a message would also block the status.
                raise asyncio.CancelledError from None

    async def handle(requests: object, context: Any) -> None:
        del requests
        try:
            _caller(context, policy)
        except RequestError as error:
            await _abort(context, error.failure)
        await policy.calls.start_call(context)
        try:
            await _until_disconnect(serve(context))
        finally:
            policy.calls.end_call()

    return handle


async def _until_disconnect(serving: Awaitable[R]) -> R:
    """Await `serving` and return its result.

    Raises CancelledError if the peer disconnects, because this is not an error of the server.
    """
    try:
        return await serving
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


def _caller(context: Any, policy: _MethodPolicy) -> Caller:
    """Return the authorised caller of a call; `_UNAUTHENTICATED` if the method needs no right.
    Raises RequestError, as `AccessControl.authorize` does."""
    if policy.right is None:
        return _UNAUTHENTICATED
    return policy.access.authorize(context, policy.right)


async def _serve(behaviour: Any, context: Any, policy: _MethodPolicy) -> Any:
    """Serve a call that has one request message, and return the handler's response.

    If the caller is rejected, a handler of Penstock is called with the failure, so that it counts
    the call and reports the failure. For other handlers the call is aborted here.
    """
    try:
        caller = _caller(context, policy)
    except RequestError as error:
        if policy.is_ours:
            return await behaviour(error.failure, context)
        await _abort(context, error.failure)
    # Calls without authentication are counted by connection.
    name = context.peer() if caller.tenant == NO_TENANT else caller.tenant
    await policy.calls.start_call(context)
    try:
        message = await _message(context, policy, name)
        call = behaviour(AdmittedCall(message, caller) if policy.is_ours else message, context)
        del message  # See `handlers.py`.
        return await call
    finally:
        policy.calls.end_call()


async def _message(context: Any, policy: _MethodPolicy, caller: str) -> Any:
    """Return the message of a call. Aborts the call if it is missing, late, too large or
    malformed."""
    return await _parsed(await _read_first(context, policy, caller), context, policy)


async def _read_first(context: Any, policy: _MethodPolicy, caller: str) -> Any:
    """Return the first message of a call as bytes, or EOF. Aborts the call if the message is late.

    A large message waits in the queue of large messages. It holds its reading slot meanwhile,
    because it takes memory.
    """
    try:
        async with asyncio.timeout(policy.max_arrival_s) as deadline:
            slot = await policy.slots.acquire(caller, deadline)
            try:
                data = await context.read()
            except BaseException:
                policy.slots.release(slot)
                raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
    except TimeoutError:
        late = (
            f"the request message did not arrive within {policy.max_arrival_s:g} s, or too slowly"
            " while others waited"
        )
        await _abort(context, Failure(reason=ErrorReason.DEADLINE_EXCEEDED, message=late))
    try:
        if data is not grpc.aio.EOF and len(data) >= LARGE_BYTES:
            policy.slots.note_arrival(slot)
            await policy.large_messages.acquire(caller)
    finally:
        policy.slots.release(slot)
    return data


async def _parsed(data: Any, context: Any, policy: _MethodPolicy) -> Any:
    if data is grpc.aio.EOF:
        await _abort(context, _NO_MESSAGE)
    failure = _TOO_LARGE if len(data) > policy.max_message_bytes else _MALFORMED
    try:
        if failure is not _TOO_LARGE:
            return policy.parse(data)
    except DecodeError:
        pass
    del data  # See `handlers.py`.
    return await _abort(context, failure)


async def _abort(context: Any, failure: Failure) -> NoReturn:
    abort = abort_of(failure)
    try:
        await context.abort(abort.code, abort.message, abort.trailers)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        # The peer has disconnected, or the core has rejected its message: no status can be sent.
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


def _identity(data: bytes) -> bytes:
    return data
