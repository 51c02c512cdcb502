"""The full names of the gRPC services and of their methods, for Penstock's services (from the
generated descriptors) and for gRPC's own services."""

from typing import Final

from penstock.v1 import generation_service_pb2, model_service_pb2, operations_service_pb2

_GENERATION = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_MODEL = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"]
_OPERATIONS = operations_service_pb2.DESCRIPTOR.services_by_name["OperationsService"]
_SERVICES: Final = {each.full_name: each for each in (_GENERATION, _MODEL, _OPERATIONS)}

GENERATION: Final = _GENERATION.full_name
MODEL: Final = _MODEL.full_name
OPERATIONS: Final = _OPERATIONS.full_name
HEALTH: Final = "grpc.health.v1.Health"
CHANNELZ: Final = "grpc.channelz.v1.Channelz"
REFLECTION: Final = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"


def method_name(service: str, method: str) -> str:
    """Return the full name of a method of Penstock, "package.Service/Method". Raises KeyError if
    the contract does not have it."""
    return f"{service}/{_SERVICES[service].methods_by_name[method].name}"


REQUEST_METHODS: Final = tuple(
    method_name(GENERATION, name) for name in ("Generate", "GenerateOnce", "Multiplex")
)
"""The methods that carry generation requests."""
