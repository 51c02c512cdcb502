"""The RPCs that Serve relays: the RPCs of Penstock's services and of gRPC health checking.

Contains their table, and the function with which Serve's proxies register them. Messages are passed
as bytes and are not parsed here, so that the service rejects malformed messages, as without Serve.
"""

from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from penstock.v1 import generation_service_pb2, model_service_pb2

_SERVICES = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
# A Watch never ends by itself, so each would delay the end of a replica. Clients that watch treat
# UNIMPLEMENTED as healthy, as the protocol requires.
_HEALTH_METHODS = ("Check",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC. Serve finds the method of the deployment by `name`; `service` is
    "package.Service"."""

    service: str
    name: str
    is_request_stream: bool
    is_response_stream: bool

    @property
    def path(self) -> str:
        """The full method name, as in the HTTP/2 path."""
        return f"/{self.service}/{self.name}"


def _methods() -> dict[str, Method]:
    # Both have the same type at run time, which type checkers cannot infer.
    found: tuple[Any, ...] = (
        *(method for service in _SERVICES for method in service.methods),
        *(method for method in _HEALTH.methods if method.name in _HEALTH_METHODS),
    )
    return {
        method.name: Method(
            service=method.containing_service.full_name,
            name=method.name,
            is_request_stream=method.client_streaming,
            is_response_stream=method.server_streaming,
        )
        for method in found
    }


METHODS = _methods()
"""Methods by name. No two services have methods with the same name, because Serve could not
distinguish them."""


def add_penstock_to_server(servicer: object, server: grpc.Server) -> None:
    """Register all methods, without parsing their messages. Named in Serve's
    `grpc_servicer_functions`.

    Serve passes a placeholder as `servicer` and replaces the handlers, so its methods are never
    called.
    """
    for service in sorted({method.service for method in METHODS.values()}):
        handlers = {
            method.name: _handler(servicer, method)
            for method in METHODS.values()
            if method.service == service
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)


def _handler(servicer: object, method: Method) -> "grpc.RpcMethodHandler[bytes, bytes]":
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[method.is_request_stream, method.is_response_stream]
    handler: grpc.RpcMethodHandler[bytes, bytes] = make(getattr(servicer, method.name))
    return handler
