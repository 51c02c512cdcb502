"""Keeps the SDK's own log lines few and free of secrets.

That a collector is down is no news every second, and headers hold the keys of whoever may write to
it.
"""

import logging
from collections.abc import Mapping

_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.attributes",
)
PAUSE_S = 60.0
_HEADER_LOGGER = "opentelemetry.util.re"
_HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")


class OncePerMinute(logging.Filter):
    """Lets each message of the code through once a minute, whatever its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may pass."""
        kind = str(record.msg)
        if record.created < self._quiet_until_s.get(kind, 0.0):
            return False
        self._quiet_until_s[kind] = record.created + PAUSE_S
        return True


class WithoutHeaders(logging.Filter):
    """Says which variable has a malformed header, in place of the SDK's line that quotes it."""

    def __init__(self, variable: str) -> None:
        super().__init__()
        self._variable = variable

    def filter(self, record: logging.LogRecord) -> bool:
        """Always passes, reworded: whatever that logger says may hold the header."""
        record.msg = "%s: what is not name=value in it is left out"
        record.args = (self._variable,)
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def quieten_exporters(environment: Mapping[str, str]) -> None:
    """Before any exporter is made. `environment`: where they find their headers."""
    headers = logging.getLogger(_HEADER_LOGGER)
    for known in [one for one in headers.filters if isinstance(one, WithoutHeaders)]:
        headers.removeFilter(known)
    variable = next((name for name in _HEADER_VARIABLES if environment.get(name)), "headers")
    headers.addFilter(WithoutHeaders(variable))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, OncePerMinute) for known in logger.filters):
            logger.addFilter(OncePerMinute())
