"""W3C trace context of a request, for the metadata of a call.

Owns the two headers and the optional use of OpenTelemetry, which is looked up once and never
required.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The trace that a call belongs to, as W3C Trace Context headers.

    Raises ValueError for an invalid header value; the server checks the content.

    Attributes:
        traceparent: The header of that name.
        tracestate: The header of that name; "" for none.
    """

    traceparent: str
    tracestate: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError naming the header that cannot be sent."""
        for name, value in (("traceparent", self.traceparent), ("tracestate", self.tracestate)):
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"{name}: must be printable ASCII, on one line")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that are set, as gRPC metadata."""
        pairs = (("traceparent", self.traceparent), ("tracestate", self.tracestate))
        return tuple((key, value) for key, value in pairs if value)


def current_trace_context() -> TraceContext | None:
    """Return the context of the current OpenTelemetry span; None without a span or the package."""
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
    """Return the W3C propagator's `inject`, independent of the propagators that are configured."""
    try:
        module: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError:
        return None
    propagator = module.TraceContextTextMapPropagator()
    return lambda headers: propagator.inject(headers)
