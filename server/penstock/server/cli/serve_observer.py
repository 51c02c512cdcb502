"""The observer settings of `penstock serve`: its ports and its traces.

Owns the default ports, and which OpenTelemetry variables switch tracing on. Its SDK reads the rest
of them.
"""

from collections.abc import Mapping
from typing import Any

from penstock.server.settings.sources import Sources

_STEPS = {"operations_port": 1, "metrics_port": 2}
"""Offset from the service's port, unless a setting overrides it."""
_MAX_PORT = 65535
_EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
_OPT_IN_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def observer_settings(sources: Sources) -> dict[str, Any]:
    """Fields by their paths. Raises ValueError naming the setting, or the variable."""
    ports: dict[str, int | None] = {}
    for name, step in _STEPS.items():
        port = sources.get("port", 50051)
        # There is none after the last port.
        behind = port + step if 0 < port <= _MAX_PORT - step else 0
        ports[name] = sources.get(name) if name in sources else behind
    if not any(port is not None for port in ports.values()):
        sources.refuse(["operations_host"], "requires a port")
    if ports["metrics_port"] is None:
        sources.refuse(["metrics_tenants"], "requires --metrics-port")
    if "tenant_metadata_key" not in sources and "policy_file" not in sources:
        sources.refuse(
            ["metrics_tenants"],
            "requires --tenant-metadata-key or --policy-file: without one there is only one tenant",
        )
    is_next = any(
        word.strip() in ("rpc", "rpc/dup")
        for word in sources.environment.get(_OPT_IN_VARIABLE, "").split(",")
    )
    return {
        **{f"observer.{name}": port for name, port in ports.items()},
        "observer.tracing.is_on": _has_traces(sources),
        "observer.tracing.has_next_rpc_keys": is_next,
    }


def _has_traces(sources: Sources) -> bool:
    """Whether an operator has enabled traces, by a setting or by OpenTelemetry's variables."""
    environment = sources.environment
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get(_EXPORTER_VARIABLE, "").strip().lower()
    if exporter == "none":
        sources.refuse(["otlp_endpoint"], f"has no effect while {_EXPORTER_VARIABLE} is none")
    is_on = exporter != "none" and (
        bool(exporter)
        or "otlp_endpoint" in sources
        or any(environment.get(name, "").strip() for name in _ENDPOINT_VARIABLES)
    )
    if is_on:
        _check_numbers(environment)
    else:
        sources.refuse(
            ["trace_slow_ttft_s", "trace_slow_s", "trace_content"],
            "requires traces: set --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT",
        )
    return is_on


def _check_numbers(environment: Mapping[str, str]) -> None:
    from penstock.server.observe.spans.variables import check_numbers

    check_numbers(environment)
