"""Provides the W3C trace context of a request, for the metadata of a call.

Defines the two headers as a value, and reads them from the current span if OpenTelemetry is
installed.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The trace to which a call belongs, as W3C Trace Context headers.

    Raises ValueError for a value that is not printable ASCII. The server checks the content.

    Attributes:
        traceparent: The header with this name.
        tracestate: The header with this name; "" for none.
    """

    traceparent: str
    tracestate: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError if a header is not printable ASCII; the message names the header."""
        for name, value in (("traceparent", self.traceparent), ("tracestate", self.tracestate)):
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"{name}: must be printable ASCII, on one line")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that are set, as gRPC metadata."""
        pairs = (("traceparent", self.traceparent), ("tracestate", self.tracestate))
        return tuple((key, value) for key, value in pairs if value)


def current_trace_context() -> TraceContext | None:
    """Return the context of the current OpenTelemetry span; None if there is no span or no
    OpenTelemetry."""
    inject = _injector()
    if inject is None:
        return None
    headers: dict[str, str] = {}
    inject(headers)
    if "traceparent" not in headers:
        return None
    return TraceContext(
        traceparent=headers["traceparent"], tracestate=headers.get("tracestate", "")
    )


@functools.cache
def _injector() -> Callable[[dict[str, str]], None] | None:
    """Return the `inject` function of the W3C propagator, regardless of the configured propagators.

    Returns None if OpenTelemetry is not installed.
    """
    try:
        module: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError:
        return None
    propagator = module.TraceContextTextMapPropagator()
    return lambda headers: propagator.inject(headers)
