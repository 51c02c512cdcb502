"""The right that each method requires, by its path: known before a message is read.

Owns that table. Handlers do not check again.
"""

from collections.abc import Mapping
from typing import Final

from penstock.server.security.rights import Right

_BY_SERVICE: Final[Mapping[str, Right | None]] = {
    "penstock.v1.GenerationService": Right.GENERATE,
    "penstock.v1.ModelService": Right.MODELS,
    "penstock.v1.OperationsService": Right.OPERATIONS_READ,
    "grpc.channelz.v1.Channelz": Right.INSPECT,
    "grpc.reflection.v1.ServerReflection": Right.INSPECT,
    "grpc.reflection.v1alpha.ServerReflection": Right.INSPECT,
    # Load balancers call it; it reveals nothing.
    "grpc.health.v1.Health": None,
    # Methods of the gateway's contract, when one is served.
    "vllm.grpc.engine.VllmEngine": Right.GENERATE,
}
_BY_METHOD: Final[Mapping[str, Right | None]] = {
    "/penstock.v1.GenerationService/Cancel": Right.CANCEL,
    "/penstock.v1.ModelService/LoadModel": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/UnloadModel": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/SetModelAlias": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/LoadAdapter": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/UnloadAdapter": Right.LOAD_MODELS,
    "/penstock.v1.OperationsService/Drain": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/DumpFlightRecord": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/SetLogLevel": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/Profile": Right.OPERATIONS_WRITE,
    "/vllm.grpc.engine.VllmEngine/Abort": Right.CANCEL,
    "/vllm.grpc.engine.VllmEngine/FlushCache": Right.OPERATIONS_WRITE,
    "/vllm.grpc.engine.VllmEngine/GetLoads": Right.OPERATIONS_READ,
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": Right.MODELS,
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": Right.MODELS,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": Right.MODELS,
    # A health probe, like grpc.health.v1.
    "/vllm.grpc.engine.VllmEngine/HealthCheck": None,
    "/vllm.grpc.engine.VllmEngine/StartProfile": Right.OPERATIONS_WRITE,
    "/vllm.grpc.engine.VllmEngine/StopProfile": Right.OPERATIONS_WRITE,
}


def right_of(path: str) -> Right | None:
    """The right that the method at `path` ("/package.Service/Method") requires; None for none.

    Raises KeyError for a service that is not in the table: every service must be listed.
    """
    if path in _BY_METHOD:
        return _BY_METHOD[path]
    return _BY_SERVICE[path[1:].rpartition("/")[0]]
