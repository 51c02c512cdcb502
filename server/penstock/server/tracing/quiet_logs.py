"""Keeps the exporters' own log lines few: that a collector is down is no news every second."""

import logging

_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.attributes",
)
PAUSE_S = 60.0


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


def quieten_exporters() -> None:
    """Once a process."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, OncePerMinute) for known in logger.filters):
            logger.addFilter(OncePerMinute())
