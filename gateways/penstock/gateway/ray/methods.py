"""The calls that pass through Serve: the contract's services, and the health of a service.

Owns their table, and the function by which Serve's proxies register them. Messages are never parsed
here: they pass as bytes, so that the service refuses malformed ones, as without Serve.
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
# A Watch never ends by itself, so each would delay the end of a replica. Clients that watch
# take UNIMPLEMENTED for healthy, as the protocol requires.
_HEALTH_METHODS = ("Check",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One RPC: `path` is "/package.Service/Name". Serve finds the deployment's method by `name`."""

    service: str
    name: str
    is_request_stream: bool
    is_response_stream: bool

    @property
    def path(self) -> str:
        """The full method name, as in the HTTP/2 path."""
        return f"/{self.service}/{self.name}"


def _methods() -> dict[str, Method]:
    # Descriptors of one kind, under two names for those who read types.
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
"""Methods by name. No two services have methods of the same name, which Serve could not
distinguish.
"""


def add_penstock_to_server(servicer: object, server: grpc.Server) -> None:
    """Register every method, without parsing its messages; named by `grpc_servicer_functions`.

    Serve replaces the behaviour of `servicer`, which is therefore never called.
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
