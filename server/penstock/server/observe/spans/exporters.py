"""Which exporters there are to be: what `OTEL_TRACES_EXPORTER` and the protocol variables say.

Exporters are found by their entry points `opentelemetry_traces_exporter`, the SDK's public way in,
so that installed ones work too; they read their other variables (endpoint, headers, certificates,
compression) themselves. The SDK's `_OTelSDKConfigurator` is not used: it would make a provider for
the whole process, metrics and logs with it, and flush it for 30 seconds on exit.

Raises ValueError naming the variable.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.sdk.trace.export import SpanExporter

DEFAULT_TIMEOUT_S = 2.0
"""Of one export with all its retries, unless a variable says otherwise. The SDK's 10 seconds would
hold up the end of the process and keep stale spans alive."""

_TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def make_exporters(environment: Mapping[str, str]) -> tuple[SpanExporter, ...]:
    """All exporters asked for; `otlp` if none is named, no exporter for `none`."""
    names = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if names.lower() == "none":
        return ()
    parts = [_entry_point_name(part.strip(), environment) for part in names.split(",")]
    return tuple(_make(name, environment) for name in dict.fromkeys(parts))


def _entry_point_name(name: str, environment: Mapping[str, str]) -> str:
    if name.lower() != "otlp":
        return name
    variable = next((v for v in _PROTOCOL_VARIABLES if environment.get(v, "").strip()), "")
    protocol = environment[variable].strip() if variable else "grpc"
    if protocol not in _OTLP:
        raise ValueError(f"{variable} must be one of {', '.join(_OTLP)}, not {protocol!r}")
    return _OTLP[protocol]


def _make(name: str, environment: Mapping[str, str]) -> SpanExporter:
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ValueError(f"OTEL_TRACES_EXPORTER: no exporter {name!r} is installed")
    arguments: dict[str, Any] = {}
    is_timed = any(environment.get(variable, "").strip() for variable in _TIMEOUT_VARIABLES)
    if name in _OTLP.values() and not is_timed:
        arguments["timeout"] = DEFAULT_TIMEOUT_S
    exporter = found.load()(**arguments)
    if not isinstance(exporter, SpanExporter):
        raise TypeError(f"OTEL_TRACES_EXPORTER: {name!r} is no exporter of spans")
    return exporter
