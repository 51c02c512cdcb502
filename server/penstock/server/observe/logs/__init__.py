"""Sets up the logging of a process: one line per event on stderr, rate-limited, without the content
of requests.

Also sets the log level of a running process. `lines` formats a line and the exception in it;
`limits` drops and rate-limits lines. Text of prompts and outputs must never be logged.
"""

import contextlib
import logging
import sys
import threading
from types import TracebackType
from typing import Any, Final, TextIO

from penstock.server.observe.logs.limits import DisconnectErrorFilter, RateLimit
from penstock.server.observe.logs.lines import (
    JsonFormatter,
    LineFormatter,
    ShortFormatter,
    TextFormatter,
)

LOG_LEVELS = ("debug", "info", "warning", "error")
_FORMATTERS: dict[str, type[LineFormatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
    "short": ShortFormatter,
}
AUTO_FORMAT = "auto"
"""The format `short` where stderr is a terminal, `text` elsewhere."""
LOG_FORMATS = (AUTO_FORMAT, *_FORMATTERS)
IN_BANNER: Final[dict[str, Any]] = {"is_in_banner": True}
"""The `extra` of a log call whose information is also in the banner of `penstock serve` on a
terminal."""

logger = logging.getLogger(__name__)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes lines to stderr. If that fails, reports where the line was logged, but not its
    text."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Write to stderr where in the code the lost line was logged, and the type of the
        exception.

        The base class would also write the arguments of the line, but these may quote a client.
        """
        kind, _, _ = sys.exc_info()
        name = "an error" if kind is None else kind.__name__
        # If stderr has no reader, the report is dropped too.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(f"a line of {record.name}:{record.lineno} is lost: {name}\n")
            self.flush()


def configure_logging(
    process: str, level: str, *, form: str = "text", has_exception_messages: bool = False
) -> None:
    """Send the log records and uncaught exceptions of this process to stderr, rate-limited.

    `process` is the name of this process in its lines. `level` is a name such as "info". `form` is
    one of LOG_FORMATS. `has_exception_messages` enables the messages of exceptions of other
    libraries; such messages may quote data of clients. Raises ValueError for an unknown level.
    """
    if form == AUTO_FORMAT:
        form = "short" if sys.stderr.isatty() else "text"
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(_FORMATTERS[form](process, has_exception_messages=has_exception_messages))
    handler.addFilter(DisconnectErrorFilter())
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    sys.excepthook = _on_uncaught
    threading.excepthook = _on_uncaught_in_thread
    sys.unraisablehook = _on_unraisable


def leave_out_banner_lines() -> None:
    """Drop, from now on, the log lines that repeat the banner of this process (`IN_BANNER`)."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not getattr(record, "is_in_banner", False))


def set_log_level(level: str) -> None:
    """Set the log level of this process. Raises ValueError for an unknown level."""
    if level not in LOG_LEVELS:
        raise ValueError(f"level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    logging.getLogger().setLevel(level.upper())


# Python's own hooks would write the message of the exception, which may quote data of clients.


def _on_uncaught(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    logger.critical("uncaught exception: this process ends", exc_info=(kind, error, frames))


def _on_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None or issubclass(arguments.exc_type, SystemExit):
        return
    name = "a thread" if arguments.thread is None else f"the thread {arguments.thread.name}"
    failure = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logger.critical("uncaught exception: %s ends", name, exc_info=failure)


def _on_unraisable(arguments: "sys.UnraisableHookArgs") -> None:
    if arguments.exc_value is None:
        logger.error("a finaliser failed with %s", arguments.exc_type.__name__)
        return
    failure = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logger.error("a finaliser failed", exc_info=failure)
