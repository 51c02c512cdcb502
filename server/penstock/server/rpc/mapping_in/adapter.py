"""Adapter: a weight set applied on top of the model for one request."""

from penstock.scheduler.executor import Feature
from penstock.server.front.errors import ErrorReason, refuse
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.v1.generation_service_pb2 import GenerateRequest

_FEATURE = Feature.ADAPTERS.value
_MAX_SCALE = 4.0


def read_adapter(request: GenerateRequest, limits: Limits, violations: Violations) -> str:
    """The adapter's name, empty for none. Raises RequestError: ADAPTER_NOT_FOUND.

    No executor scales an adapter, so any strength other than 1 is refused.
    """
    if not request.HasField("adapter"):
        return ""
    if Feature.ADAPTERS not in limits.features:
        violations.require_feature(_FEATURE, "adapter", is_supported=False)
        return ""
    adapter = request.adapter
    if adapter.HasField("scale"):
        scale = violations.number("adapter.scale", adapter.scale, -_MAX_SCALE, _MAX_SCALE)
        violations.require_feature(_FEATURE, "adapter.scale", is_supported=scale == 1)
    if not adapter.name:
        violations.add("adapter.name", "must not be empty")
    elif adapter.name not in limits.adapters:
        raise refuse(ErrorReason.ADAPTER_NOT_FOUND, adapter=adapter.name)
    return adapter.name
