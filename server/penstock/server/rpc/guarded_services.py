"""Services that come with gRPC, reflection and channelz, behind the gate.

Owns the wrapping of their handlers, which know nothing of rights. Refusals look like those of our
own services.
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2_grpc

from penstock.server.front.errors import RequestError
from penstock.server.rpc.gate import Gate
from penstock.server.rpc.handlers import Context
from penstock.server.rpc.reflection import HandlerHouse
from penstock.server.rpc.statuses import abort_of
from penstock.server.security.rights import Right


class GuardedServer:
    """Stands in for a server where handlers are added: those are guarded by `right`."""

    def __init__(self, server: HandlerHouse, gate: Gate, right: Right) -> None:
        self._server = server
        self._gate = gate
        self._right = right

    def add_generic_rpc_handlers(self, handlers: "Iterable[grpc.GenericRpcHandler]") -> None:
        """As the server's own."""
        self._server.add_generic_rpc_handlers(
            tuple(_GuardedHandler(handler, self._gate, self._right) for handler in handlers)
        )

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """The same handlers once more, for servers that know methods in advance: not needed."""


def add_channelz(server: GuardedServer) -> None:
    """Serve channelz."""
    # Untyped upstream, and its own function takes nothing that stands in for a server.
    add_servicer = cast(Any, channelz_pb2_grpc.add_ChannelzServicer_to_server)  # pyright: ignore[reportUnknownMemberType]
    add_servicer(channelz.aio.ChannelzServicer(), server)


class _GuardedHandler(grpc.GenericRpcHandler):
    def __init__(self, handler: grpc.GenericRpcHandler, gate: Gate, right: Right) -> None:
        self._handler = handler
        self._gate = gate
        self._right = right

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a method, guarded; None for a method of others."""
        found = self._handler.service(handler_call_details)
        if found is None:
            return None
        # Reflection is a stream both ways and channelz has one answer each; nothing else is here.
        if found.request_streaming and found.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                cast(Any, self._stream(cast(Any, found.stream_stream))),
                request_deserializer=found.request_deserializer,
                response_serializer=found.response_serializer,
            )
        if found.request_streaming or found.response_streaming:
            raise TypeError("a service with a method of a kind that is not guarded")
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, self._unary(cast(Any, found.unary_unary))),
            request_deserializer=found.request_deserializer,
            response_serializer=found.response_serializer,
        )

    def _unary(
        self, behaviour: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            await self._admit(context)
            return await behaviour(request, context)

        return guarded

    def _stream(
        self, behaviour: Callable[[AsyncIterable[Any], Context], AsyncIterator[Any]]
    ) -> Callable[[AsyncIterable[Any], Context], AsyncIterator[Any]]:
        async def guarded(requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
            await self._admit(context)
            async for response in behaviour(requests, context):
                yield response

        return guarded

    async def _admit(self, context: Context) -> None:
        try:
            self._gate.admit(context, self._right)
        except RequestError as error:
            abort = abort_of(error.refusal)
            await context.abort(abort.code, abort.message, abort.trailers)
