"""Log lines: one per event, on stderr, with time, level and process.

Owns the format. Never the place for prompt or completion text, and no caller puts it here.
"""

import logging
import os
import sys
import time

LOG_LEVELS = ("debug", "info", "warning", "error")


class OneLineFormatter(logging.Formatter):
    """`<UTC time> <LEVEL> <process>[<pid>] <logger>: <message>`, tracebacks folded in."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = f"{process}[{os.getpid()}]"

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        text = record.getMessage()
        if record.exc_info:
            text = f"{text} | {self.formatException(record.exc_info)}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = text.replace("\r", "\\r").replace("\n", "\\n")
        return (
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._process}"
            f" {record.name}: {text}"
        )


def configure_logging(process: str, level: str) -> None:
    """Send all log records of this process to stderr. `level` is a name such as "info"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_log_level(level: str) -> None:
    """From now on. Raises ValueError for what is no level of ours."""
    if level not in LOG_LEVELS:
        raise ValueError(f"level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    logging.getLogger().setLevel(level.upper())
