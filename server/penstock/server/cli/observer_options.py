"""The settings of `penstock serve` that say what of it may be looked at, and where.

Owns their table, what they mean together, and which variables of OpenTelemetry switch tracing on.
What those say beyond that is for its SDK.
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.cli.option import Option

if TYPE_CHECKING:
    from penstock.server.telemetry.config import ObserverConfig, TracingConfig

OFF = "off"
OPERATIONS_PORT_STEP, METRICS_PORT_STEP = 1, 2
"""How far behind the service's port these are, unless a setting says otherwise."""
_MAX_PORT = 65535
_EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
_OPT_IN_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACE_OPTIONS = ("trace_slow_ttft_s", "trace_slow_s", "trace_content")

OBSERVER_OPTIONS = (
    Option(
        flag="operations-port",
        parse=str,
        default=None,
        metavar="N|off",
        help="port of the operations service, 0 for any free one (default: the port + 1, any free"
        " one where that is 0)",
    ),
    Option(
        flag="metrics-port",
        parse=str,
        default=None,
        metavar="N|off",
        help="port of Prometheus metrics and the status page (default: the port + 2, any free one"
        " where that is 0)",
    ),
    Option(
        flag="operations-host",
        parse=str,
        default=None,
        help="address that operators connect to, on both ports (default: 127.0.0.1)",
    ),
    Option(
        flag="metrics-tenants",
        parse=str,
        default=None,
        metavar="NAME,...",
        help="tenants that metrics tell apart; all others are one (default: no metrics of tenants)",
    ),
    Option(
        flag="otlp-endpoint",
        parse=str,
        default=None,
        metavar="URL",
        help="collector that traces go to, in place of OTEL_EXPORTER_OTLP_ENDPOINT and"
        " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; the other OTEL_ variables hold as they are (default:"
        " no traces)",
    ),
    Option(
        flag="trace-slow-ttft-s",
        parse=float,
        default=None,
        help="seconds to a first token beyond which a trace is always kept (default: no limit)",
    ),
    Option(
        flag="trace-slow-s",
        parse=float,
        default=None,
        help="seconds of a whole request beyond which a trace is always kept (default: no limit)",
    ),
    Option(
        flag="trace-content",
        parse=str,
        default=None,
        choices=("on", "off"),
        help="whether prompts and outputs go into the traces (default: off)",
    ),
    Option(
        flag="flight-steps",
        parse=int,
        default=None,
        help="steps that the flight recorder keeps, a power of two (default: 4096)",
    ),
    Option(
        flag="flight-folder",
        parse=str,
        default=None,
        metavar="DIR",
        help="where flight records are written when the engine dies, on SIGUSR1 and on request"
        " (default: penstock-flight-<uid> among the temporary files)",
    ),
)


class TracingByVariables(enum.Enum):
    """What the `OTEL_*` variables say of traces."""

    ON = "on"
    UNSAID = "unsaid"
    NO_EXPORTER = "no exporter"
    DISABLED = "disabled"


def tracing_by_variables(environment: Mapping[str, str]) -> TracingByVariables:
    """Whether somebody who knows OpenTelemetry has asked for traces, or against them."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TracingByVariables.DISABLED
    exporter = environment.get(_EXPORTER_VARIABLE, "").strip().lower()
    if exporter == "none":
        return TracingByVariables.NO_EXPORTER
    is_asked_for = exporter or any(
        environment.get(name, "").strip() for name in _ENDPOINT_VARIABLES
    )
    return TracingByVariables.ON if is_asked_for else TracingByVariables.UNSAID


def wants_next_rpc_keys(environment: Mapping[str, str]) -> bool:
    """Whether the variable by which conventions are stepped up asks for those of RPC."""
    words = environment.get(_OPT_IN_VARIABLE, "").split(",")
    return any(word.strip() in ("rpc", "rpc/dup") for word in words)


def bad_tracing_number(environment: Mapping[str, str]) -> str | None:
    """What is wrong with a number among the variables of OpenTelemetry, naming it; None: nothing.

    For `observer_config`, which knows whether it matters.
    """
    from penstock.server.telemetry.tracing_variables import check_numbers

    try:
        check_numbers(environment)
    except ValueError as error:
        return str(error)
    return None


def observer_config(settings: Mapping[str, Any]) -> "ObserverConfig":
    """Of `serve`'s merged settings. Raises ValueError naming the option, or the variable."""
    from penstock.server.telemetry.config import FlightConfig, ObserverConfig

    flight = FlightConfig(folder=_flight_folder(settings["flight_folder"]))
    if settings["flight_steps"] is not None:
        flight = replace(flight, num_steps=settings["flight_steps"])
    metrics_port = _port(settings, "metrics-port", METRICS_PORT_STEP)
    operations_port = _port(settings, "operations-port", OPERATIONS_PORT_STEP)
    host = settings["operations_host"]
    if host is not None and metrics_port is None and operations_port is None:
        raise ValueError("operations-host means nothing without a port")
    return ObserverConfig(
        metrics_port=metrics_port,
        operations_port=operations_port,
        operations_host="127.0.0.1" if host is None else host,
        metrics_tenants=_metrics_tenants(settings, metrics_port),
        tracing=_tracing_config(settings),
        flight=flight,
    )


def _metrics_tenants(settings: Mapping[str, Any], metrics_port: int | None) -> tuple[str, ...]:
    text: str | None = settings["metrics_tenants"]
    if text is None:
        return ()
    if metrics_port is None:
        raise ValueError("metrics-tenants means nothing without metrics-port")
    if settings["tenant_metadata_key"] is None and settings["policy_file"] is None:
        raise ValueError(
            "metrics-tenants needs tenant-metadata-key or policy-file: everybody is one tenant"
        )
    return tuple(name.strip() for name in text.split(","))


def _tracing_config(settings: Mapping[str, Any]) -> "TracingConfig":
    from penstock.server.telemetry.config import TracingConfig

    said: TracingByVariables = settings["tracing"]
    endpoint: str | None = settings["otlp_endpoint"]
    if endpoint is not None and said is TracingByVariables.NO_EXPORTER:
        raise ValueError(f"otlp-endpoint means nothing while {_EXPORTER_VARIABLE} is none")
    is_on = said is TracingByVariables.ON or (
        endpoint is not None and said is TracingByVariables.UNSAID
    )
    if is_on and settings["bad_tracing_number"] is not None:
        raise ValueError(settings["bad_tracing_number"])
    if said in (TracingByVariables.UNSAID, TracingByVariables.NO_EXPORTER) and not is_on:
        for name in _TRACE_OPTIONS:
            if settings[name] is not None:
                raise ValueError(
                    f"{name.replace('_', '-')} means nothing without traces: otlp-endpoint or"
                    " OTEL_EXPORTER_OTLP_ENDPOINT says where they go"
                )
    return TracingConfig(
        is_on=is_on,
        slow_ttft_s=settings["trace_slow_ttft_s"],
        slow_s=settings["trace_slow_s"],
        has_content=settings["trace_content"] == "on",
        has_next_rpc_keys=settings["has_next_rpc_keys"],
        otlp_endpoint=endpoint,
    )


def _port(settings: Mapping[str, Any], flag: str, step: int) -> int | None:
    text: str | None = settings[flag.replace("-", "_")]
    if text == OFF:
        return None
    if text is None:
        port = int(settings["port"])
        # Behind the last port there is none.
        return port + step if 0 < port <= _MAX_PORT - step else 0
    if not (text.isascii() and text.isdecimal()) or int(text) > _MAX_PORT:
        raise ValueError(f"{flag} must be in 0..{_MAX_PORT} or {OFF}, not {text!r}")
    return int(text)


def _flight_folder(text: str | None) -> Path | None:
    """The folder, made if need be: whoever names one is told now if it cannot be written to."""
    if text is None:
        return None
    path = Path(text).expanduser().resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"flight-folder: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"flight-folder: {path} cannot be written to")
    return path
