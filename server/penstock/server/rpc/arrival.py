"""Calls that are only begun: who makes them is asked first, their metadata has a bound, their
message must arrive in time, and be a message.

Owns the taking of the one message of a call, for every service alike, those that come with gRPC
included. gRPC by itself waits for it as long as the connection lives, so that a client could hold
any number of half-open calls; and it answers malformed bytes with UNKNOWN and the name of a class.
It bounds metadata only once a client has acknowledged the settings that say so.

On the wire a method that takes one message is no different from one that takes a stream of them.
So each is served as a stream here, of which one message is read.

A message takes memory while it arrives. Nothing is read of a caller whose headers show that the
call is not its to make: its handler gets the refusal in place of the message. What is read of the
others is rationed (`reading_slots.py`). A caller is judged here and nowhere else but in Multiplex,
whose requests are judged one by one: our handlers get the judgement with the message. The services
that come with gRPC deserialise messages, ours take bytes: by that they are told apart.
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

from penstock.server.front.errors import ErrorReason, Refusal, RequestError
from penstock.server.front.tenants import NO_TENANT, PriorityCeilings
from penstock.server.rpc.gate import Gate
from penstock.server.rpc.handlers import Admitted
from penstock.server.rpc.large_turns import LARGE_BYTES, LargeTurns
from penstock.server.rpc.method_rights import right_of
from penstock.server.rpc.options import MAX_ANY_METADATA_BYTES, MAX_MESSAGE_BYTES
from penstock.server.rpc.reading_slots import ReadingSlots
from penstock.server.rpc.reflection import HandlerHouse
from penstock.server.rpc.statuses import abort_of
from penstock.server.security.rights import Caller, Right

R = TypeVar("R")
_MALFORMED = Refusal(reason=ErrorReason.MALFORMED_REQUEST)
_NO_MESSAGE = Refusal(reason=ErrorReason.MALFORMED_REQUEST, message="the call has no message")
_TOO_LARGE = Refusal(
    reason=ErrorReason.MALFORMED_REQUEST, message="the message is too large for this method"
)
_MAX_READINGS: Final = 64
_MAX_READINGS_PER_CALLER: Final = 4
_HURRIED_S: Final = 2.0
"""At most that many messages are on their way in at a time, of a few MiB each; of one caller too.
What arrives whole does so within a turn of the event loop or two, so few ever wait; but large ones
hold their place until their turn (`large_turns.py`)."""
MAX_OPEN_READINGS: Final = 16
_MAX_OPEN_READINGS_PER_CALLER: Final = 4
_MAX_OPEN_MESSAGE_BYTES: Final = 4096
_HURRIED_OPEN_S: Final = 0.25
"""The same of methods that are open to strangers: a name of a service is all they take."""
_STRANGER: Final = Caller(tenant=NO_TENANT, rights=frozenset(), ceilings=PriorityCeilings(0, 0))
"""Who calls a method that asks for no right, and is not asked who it is."""


class _CallCount:
    """Calls of some methods that are being handled, at most `max_num`."""

    def __init__(self, max_num: float) -> None:
        self._max_num = max_num
        self._num = 0

    async def enter(self, context: Any) -> None:
        """One more; where that is too many, the call ends here."""
        if self._num >= self._max_num:
            await _exhausted(context, "too many calls at a time")
        self._num += 1

    def leave(self) -> None:
        """One that entered is over."""
        self._num -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How the messages of one method come in. `right`: see `right_of`."""

    path: str
    right: Right | None
    gate: Gate
    slots: ReadingSlots
    calls: _CallCount
    turns: LargeTurns
    max_arrival_s: float
    max_stall_s: float
    max_message_bytes: int
    parse: Callable[[bytes], Any]
    is_ours: bool


class TimelyServer:
    """Stands in for a server where handlers are added.

    `max_arrival_s`: see `TransportConfig`. `max_stall_s`: how long one write of a service that
    comes with gRPC may be blocked. `gate` knows who may call. `max_calls`: handled at a time, and
    as many again of methods that are open to strangers. `turns`: of large messages; None: its own.
    """

    def __init__(
        self,
        server: HandlerHouse,
        gate: Gate,
        *,
        max_arrival_s: float,
        max_stall_s: float,
        max_calls: float = math.inf,
        turns: LargeTurns | None = None,
    ) -> None:
        self._calls, self._open_calls = _CallCount(max_calls), _CallCount(max_calls)
        self._turns = turns or LargeTurns()
        self._server = server
        self._gate = gate
        self._max_arrival_s = max_arrival_s
        self._max_stall_s = max_stall_s
        self._slots = ReadingSlots(
            max_num=_MAX_READINGS,
            max_per_caller=_MAX_READINGS_PER_CALLER,
            hurried_s=_HURRIED_S,
        )
        self._open_slots = ReadingSlots(
            max_num=MAX_OPEN_READINGS,
            max_per_caller=_MAX_OPEN_READINGS_PER_CALLER,
            hurried_s=_HURRIED_OPEN_S,
        )

    def add_generic_rpc_handlers(self, handlers: "Iterable[grpc.GenericRpcHandler]", /) -> None:
        """As the server's own."""
        self._server.add_generic_rpc_handlers(
            tuple(_TimelyHandler(one, self._way_of) for one in handlers)
        )

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """The same handlers once more, for servers that know methods in advance: not needed."""

    def _way_of(self, path: str, found: "grpc.RpcMethodHandler[Any, Any]") -> _Way:
        right = right_of(path)
        is_open = right is None
        return _Way(
            path=path,
            right=right,
            gate=self._gate,
            slots=self._open_slots if is_open else self._slots,
            calls=self._open_calls if is_open else self._calls,
            turns=self._turns,
            max_arrival_s=self._max_arrival_s,
            max_stall_s=self._max_stall_s,
            max_message_bytes=_MAX_OPEN_MESSAGE_BYTES if is_open else MAX_MESSAGE_BYTES,
            parse=found.request_deserializer or _as_it_is,
            is_ours=found.request_deserializer is None,
        )


WayOf = Callable[[str, "grpc.RpcMethodHandler[Any, Any]"], _Way]


class _TimelyHandler(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, way_of: WayOf) -> None:
        self._inner = inner
        self._way_of = way_of
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
            made = self._made[path] = _timely(found, self._way_of(path, found))
        return made


def _metadata_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """What HTTP/2 counts as the size of a list of headers (RFC 9113, 6.5.2), as near as needed."""
    return sum(len(key) + len(value) + 32 for key, value in metadata)


async def _refuse_metadata(requests: object, context: Any) -> None:
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


_REFUSE_METADATA: "grpc.RpcMethodHandler[Any, Any]" = grpc.stream_stream_rpc_method_handler(
    cast(Any, _refuse_metadata)
)


def _timely(
    found: "grpc.RpcMethodHandler[Any, Any]", way: _Way
) -> "grpc.RpcMethodHandler[Any, Any]":
    if found.request_streaming:
        # Ours read for themselves.
        if way.is_ours:
            return found
        write_as = cast("Callable[[Any], bytes]", found.response_serializer)
        return grpc.stream_stream_rpc_method_handler(
            _parsed_stream(cast(Any, found.stream_stream), way, write_as)
        )
    if found.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _one_then_stream(cast(Any, found.unary_stream), way),
            response_serializer=found.response_serializer,
        )
    return grpc.stream_unary_rpc_method_handler(
        _one_then_one(cast(Any, found.unary_unary), way),
        response_serializer=found.response_serializer,
    )


def _one_then_one(behaviour: Any, way: _Way) -> Any:
    async def handle(requests: object, context: Any) -> Any:
        del requests
        return await _until_left(_serve(behaviour, context, way))

    return handle


def _one_then_stream(behaviour: Any, way: _Way) -> Any:
    async def handle(requests: object, context: Any) -> None:
        del requests
        await _until_left(_serve(behaviour, context, way))

    if inspect.iscoroutinefunction(behaviour):
        return handle
    raise TypeError("a stream of responses is written by its handler")


def _parsed_stream(behaviour: Any, way: _Way, write_as: Callable[[Any], bytes]) -> Any:
    """Only the first message must come in time: who is served may take its time for the next."""

    async def messages(context: Any) -> AsyncIterator[Any]:
        data = await _first(context, way, context.peer())
        while data is not grpc.aio.EOF:
            yield await _parsed(data, context, way)
            data = await context.read()

    async def serve(context: Any) -> None:
        async for response in behaviour(messages(context), context):
            try:
                async with asyncio.timeout(way.max_stall_s):
                    await context.write(write_as(response))
            except TimeoutError:
                # Nobody takes a status from a stream that takes no message.
                raise asyncio.CancelledError from None

    async def handle(requests: object, context: Any) -> None:
        del requests
        try:
            _caller(context, way)
        except RequestError as error:
            await _abort(context, error.refusal)
        await way.calls.enter(context)
        try:
            await _until_left(serve(context))
        finally:
            way.calls.leave()

    return handle


async def _until_left(serving: Awaitable[R]) -> R:
    """A write that was under way when the peer vanished is no fault of ours."""
    try:
        return await serving
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error


def _caller(context: Any, way: _Way) -> Caller:
    """Who makes the call, as the handler will be told. Raises RequestError."""
    return _STRANGER if way.right is None else way.gate.admit(context, way.right)


async def _serve(behaviour: Any, context: Any, way: _Way) -> Any:
    """A call with one message. Handlers of ours refuse for themselves, which is counted."""
    try:
        caller = _caller(context, way)
    except RequestError as error:
        if way.is_ours:
            return await behaviour(error.refusal, context)
        await _abort(context, error.refusal)
    # Strangers are as many as their connections.
    name = context.peer() if caller.tenant == NO_TENANT else caller.tenant
    await way.calls.enter(context)
    try:
        message = await _message(context, way, name)
        call = behaviour(Admitted(message, caller) if way.is_ours else message, context)
        del message  # see handlers.py
        return await call
    finally:
        way.calls.leave()


async def _message(context: Any, way: _Way, caller: str) -> Any:
    """The message of a call; where there is none, the call ends here."""
    return await _parsed(await _first(context, way, caller), context, way)


async def _first(context: Any, way: _Way, caller: str) -> Any:
    """The first message of a call, as bytes, or EOF; a large one in its turn.

    Its slot is held until then: what waits for its turn takes memory too.
    """
    try:
        async with asyncio.timeout(way.max_arrival_s) as deadline:
            slot = await way.slots.take(caller, deadline)
            try:
                data = await context.read()
            except BaseException:
                way.slots.give_back(slot)
                raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error
    except TimeoutError:
        late = (
            f"the message of the call did not arrive within {way.max_arrival_s:g} s, or too slowly"
            " while others waited"
        )
        await _abort(context, Refusal(reason=ErrorReason.DEADLINE_EXCEEDED, message=late))
    try:
        if data is not grpc.aio.EOF and len(data) >= LARGE_BYTES:
            way.slots.note_arrival(slot)
            await way.turns.take(caller)
    finally:
        way.slots.give_back(slot)
    return data


async def _parsed(data: Any, context: Any, way: _Way) -> Any:
    if data is grpc.aio.EOF:
        await _abort(context, _NO_MESSAGE)
    refusal = _TOO_LARGE if len(data) > way.max_message_bytes else _MALFORMED
    try:
        if refusal is not _TOO_LARGE:
            return way.parse(data)
    except DecodeError:
        pass
    del data  # see handlers.py
    return await _abort(context, refusal)


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


def _as_it_is(data: bytes) -> bytes:
    return data
