"""What resources that Kubernetes does not bring may say, as far as we use them.

Owns two schemas, written from the API references of the Prometheus operator and the Gateway API
inference extension. They know less than the real ones: what is not in them is refused, so that a
new key is looked up before it is used.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: list[str], **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = _object(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
_LABELS = {
    "type": "object",
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}
_SELECTOR = _object(["matchLabels"], matchLabels=_LABELS)
_SECRET_KEY = _object(["name", "key"], name=_NAME, key=_NAME)
_METADATA = _object(["name"], name=_NAME, namespace=_NAME, labels=_LABELS)
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}

_POD_MONITOR = _object(
    ["podMetricsEndpoints", "selector"],
    jobLabel={"type": "string"},
    selector=_SELECTOR,
    podMetricsEndpoints={
        "type": "array",
        "minItems": 1,
        "items": _object(
            ["port"],
            port={"type": "string"},
            path={"type": "string", "pattern": "^/"},
            scheme={"enum": ["http", "https"]},
            interval=_DURATION,
            scrapeTimeout=_DURATION,
            authorization=_object(
                ["credentials"], type={"const": "Bearer"}, credentials=_SECRET_KEY
            ),
            tlsConfig=_object([], serverName=_NAME, ca=_object(["secret"], secret=_SECRET_KEY)),
        ),
    },
)
_INFERENCE_POOL = _object(
    ["selector", "targetPorts", "endpointPickerRef"],
    selector=_SELECTOR,
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_object(
        ["name"],
        group={"type": "string"},
        kind={"type": "string"},
        name=_NAME,
        port=_PORT,
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)


def _resource(api_version: str, kind: str, spec: Schema) -> tuple[tuple[str, str], Schema]:
    whole = _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )
    return (api_version, kind), whole


SCHEMAS: dict[tuple[str, str], Schema] = dict(
    (
        _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
        _resource("inference.networking.k8s.io/v1", "InferencePool", _INFERENCE_POOL),
    )
)
