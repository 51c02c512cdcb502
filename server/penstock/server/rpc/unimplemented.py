"""RPCs of the contract that are not built yet: UNIMPLEMENTED, naming the feature.

Owns the table of such RPCs.
"""

from collections.abc import Mapping
from typing import Any, Final

import grpc

from penstock.server.front.errors import refuse_feature
from penstock.server.rpc.handlers import Context, HandlerWrapper
from penstock.server.security.rights import Caller

UNIMPLEMENTED_METHODS: Final[Mapping[str, str]] = {
    "penstock.v1.ModelService/LoadModel": "model_loading",
    "penstock.v1.ModelService/UnloadModel": "model_loading",
    "penstock.v1.ModelService/WatchModels": "model_loading",
    "penstock.v1.ModelService/SetModelAlias": "model_loading",
    "penstock.v1.ModelService/LoadAdapter": "adapter_loading",
    "penstock.v1.ModelService/UnloadAdapter": "adapter_loading",
    "penstock.v1.ModelService/ListAdapters": "adapter_loading",
}
"""Method -> feature, a field of ModelFeatures."""
_STREAMS: Final = frozenset(
    {"penstock.v1.ModelService/LoadModel", "penstock.v1.ModelService/WatchModels"}
)


def unimplemented_handlers(
    service: str, wrapper: HandlerWrapper
) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    """Handlers for the methods of `service` (full name) that are in the table."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for path, feature in UNIMPLEMENTED_METHODS.items():
        owner, _, method = path.partition("/")
        if owner == service:
            handlers[method] = _handler(path, feature, wrapper)
    return handlers


def _handler(path: str, feature: str, wrapper: HandlerWrapper) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse_unary(data: bytes, context: Context) -> bytes:
        del data, context
        raise refuse_feature(feature)

    async def refuse_stream(data: bytes, context: Context, caller: Caller) -> None:
        del data, context, caller
        raise refuse_feature(feature)

    if path in _STREAMS:
        return wrapper.stream_with_caller(path, refuse_stream)
    return wrapper.unary(path, refuse_unary)
