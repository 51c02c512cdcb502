"""Serves gRPC server reflection in the versions v1 and v1alpha.

grpcio-reflection contains only v1alpha. The two versions differ only in the package name, so v1 is
served with the same messages under its own name. The descriptor of v1 is derived from the
descriptor of v1alpha, so that tools can also describe the reflection service.
"""

from collections.abc import Iterable
from typing import Any, Protocol, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.server.rpc import service_names

_NAMES = (service_names.REFLECTION_ALPHA, service_names.REFLECTION)
_ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_V1_PACKAGE = "grpc.reflection.v1"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


class HandlerRegistry(Protocol):
    """A server, or a wrapper of a server, to which handlers are added."""

    def add_generic_rpc_handlers(self, handlers: "Iterable[grpc.GenericRpcHandler]", /) -> None:
        """Register `handlers` with the server."""
        ...


def add_reflection(server: HandlerRegistry, described: Iterable[str]) -> None:
    """Add the reflection service to `server`. It describes itself and the services with the full
    names `described`."""
    _register_v1_descriptor()
    servicer = reflection.aio.ReflectionServicer((*described, *_NAMES))
    # Untyped upstream.
    behaviour = cast(Any, servicer.ServerReflectionInfo)  # pyright: ignore[reportUnknownMemberType]
    handler = grpc.stream_stream_rpc_method_handler(
        behaviour,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in _NAMES
        )
    )


def _register_v1_descriptor() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        pass
    else:
        return
    proto = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    proto.name = _V1_FILE
    proto.package = _V1_PACKAGE
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name)
    for service in proto.service:
        for method in service.method:
            method.input_type = _renamed(method.input_type)
            method.output_type = _renamed(method.output_type)
    pool.Add(proto)


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{_ALPHA_PACKAGE}.", f".{_V1_PACKAGE}.")
