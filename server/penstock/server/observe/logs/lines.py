"""Formats log lines as text for humans, as shorter text for a terminal, or as JSON for log
collectors.

Defines the fields, their names and the escaping. The escaping keeps each event on one line even if
the request id contains line breaks.

The type and the frames of an exception are always logged, its message only if it is safe. The
message of an exception raised while a request is handled may quote the request ("invalid literal:
'...'"), so without `has_exception_messages` messages are logged only from these sources:

- Penstock's exceptions, except exceptions of packages that handle client data; the part after a
  colon may quote the cause of the exception, so it is removed if a cause is of another source;
- errors of the operating system, by their number;
- MemoryError and the errors of device drivers, which do not contain request data.

If a process cannot start, the full message of the error is reported in one line.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from penstock.server.observe.logs.limits import LEFT_OUT

FACTS = ("request_id", "trace_id", "tenant", "front_id", "step")
"""Keys of `extra` that are written after the message. Other keys are ignored, except
EXCEPTION_MESSAGE."""
EXCEPTION_MESSAGE = "exception_message"
"""The key of `extra` for a message of another library, which is written only if
`has_exception_messages` is set."""
_SHORT_NAMES = {"request_id": "request", "trace_id": "trace"}
_QUOTERS = "asyncio"
"""A logger whose messages contain the repr of objects, and therefore their content."""

_CONTROLS = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))},
    **{ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"},
    **{0x2028: "\\u2028", 0x2029: "\\u2029"},
}


MAX_FAILURES = 8
MAX_FRAMES = 24
_OURS = "penstock."
_NEAR_CONTENT = (
    "penstock.server.front.",
    "penstock.server.rpc.",
    "penstock.server.text.",
    "penstock.client.",
)
_DRIVERS = {
    ("builtins", "MemoryError"),
    ("torch", "AcceleratorError"),
    ("torch", "OutOfMemoryError"),
    ("torch.cuda", "OutOfMemoryError"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a traceback. It has the name of the module instead of the path, because paths
    contain home folders."""

    module: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedException:
    """One exception: its qualified type name `kind`, its `message` (empty if it must not be logged)
    and its frames, the outermost first."""

    kind: str
    message: str
    frames: tuple[Frame, ...]


def failures_of(
    error: BaseException, *, has_exception_messages: bool
) -> tuple[LoggedException, ...]:
    """Return the exception, its chain of causes and the members of exception groups, at most
    `MAX_FAILURES` in total."""
    return tuple(
        LoggedException(
            kind=_kind_of(link),
            message=_error_message_of(link, has_exception_messages=has_exception_messages),
            frames=_frames_of(link.__traceback__),
        )
        for link in _chain_of(error, has_suppressed=False)
    )


def _chain_of(error: BaseException, *, has_suppressed: bool) -> Iterator[BaseException]:
    """Yield the exception, its chain of causes and the members of exception groups.

    If `has_suppressed`, includes causes hidden by `raise ... from None`, because messages of
    Penstock's exceptions may quote them.
    """
    seen: set[int] = set()
    left = [error]
    while left and len(seen) < MAX_FAILURES:
        link = left.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            left += cast("tuple[BaseException, ...]", link.exceptions)
        origin = link.__cause__
        if origin is None and (has_suppressed or not link.__suppress_context__):
            origin = link.__context__
        if origin is not None:
            left.append(origin)


def _kind_of(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _error_message_of(error: BaseException, *, has_exception_messages: bool) -> str:
    if has_exception_messages or _is_driver_error(error):
        return _text_of(error)
    if isinstance(error, OSError):
        return _system_message(error)
    if not _is_ours(error):
        return ""
    words = _text_of(error)
    origins = list(_chain_of(error, has_suppressed=True))[1:]
    return words if all(map(_is_ours, origins)) else words.partition(":")[0]


def _is_ours(error: BaseException) -> bool:
    module = f"{type(error).__module__}."
    return module.startswith(_OURS) and not module.startswith(_NEAR_CONTENT)


def _is_driver_error(error: BaseException) -> bool:
    kind = type(error)
    return (kind.__module__, kind.__qualname__) in _DRIVERS


def _system_message(error: OSError) -> str:
    """Return the system's message for the error number, "" without a number.

    The text in the exception itself may come from another library, such as SSL.
    """
    if not isinstance(error.errno, int) or error.errno <= 0:
        return ""
    return os.strerror(error.errno)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # Code of other libraries must not break a log line.
        return ""


def _frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """Return the frames, at most the innermost `MAX_FRAMES`."""
    frames: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        module = traceback.tb_frame.f_globals.get("__name__", code.co_filename)
        frames.append(
            Frame(module=str(module), line=traceback.tb_lineno, function=code.co_qualname)
        )
        traceback = traceback.tb_next
    return tuple(frames[-MAX_FRAMES:])


class LineFormatter(logging.Formatter):
    """The base class of the formatters. `process` is the name of the process in the lines; see
    `configure_logging` for `has_exception_messages`."""

    def __init__(self, process: str, *, has_exception_messages: bool = False) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()
        self._has_exception_messages = has_exception_messages

    def _message_of(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name.partition(".")[0] == _QUOTERS and not self._has_exception_messages:
            # "Exception in callback f(arguments)", "...\nfuture: <Task ... exception=...>".
            message = message.partition("\n")[0].partition("(")[0]
        return message

    def _facts_of(self, record: logging.LogRecord) -> dict[str, Any]:
        names = (*FACTS, EXCEPTION_MESSAGE) if self._has_exception_messages else FACTS
        facts = {name: getattr(record, name, None) for name in names}
        return {name: fact for name, fact in facts.items() if fact not in (None, "")}

    def _failures_of(self, record: logging.LogRecord) -> tuple[LoggedException, ...]:
        if not record.exc_info or record.exc_info[1] is None:
            return ()
        return failures_of(record.exc_info[1], has_exception_messages=self._has_exception_messages)


class TextFormatter(LineFormatter):
    """Formats a line as `<UTC time> <LEVEL> <process>[<pid>] <logger>: <message>`.

    The values of `FACTS`, the number of similar lines that were dropped, and the exception follow
    the message.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return (
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._process}[{self._pid}]"
            f" {record.name}: {self._text_of(record)}"
        )

    def _text_of(self, record: logging.LogRecord) -> str:
        parts = [self._message_of(record)]
        for name, fact in self._facts_of(record).items():
            parts.append(f"{_SHORT_NAMES.get(name, name)}={_quoted(str(fact))}")
        num_left_out = getattr(record, LEFT_OUT, 0)
        if num_left_out:
            parts.append(f"({num_left_out} more like it left out)")
        failures = " from ".join(map(_as_text, self._failures_of(record)))
        if failures:
            parts.append(f"| {failures}")
        return " ".join(parts).translate(_CONTROLS)


class ShortFormatter(TextFormatter):
    """Formats a line for a terminal: `<local time> <process>: <message>`. The level is added unless
    it is INFO."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f" {record.levelname}"
        return f"{stamp}{level} {self._process}: {self._text_of(record)}"


class JsonFormatter(LineFormatter):
    """Formats a record as one JSON object per line. Empty fields are left out."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": self._pid,
            "logger": record.name,
            "message": self._message_of(record),
            **self._facts_of(record),
        }
        num_left_out = getattr(record, LEFT_OUT, 0)
        if num_left_out:
            entry[LEFT_OUT] = num_left_out
        failures = self._failures_of(record)
        if failures:
            entry["exception"] = [_as_object(failure) for failure in failures]
        # Escape non-ASCII characters, so that no reader splits a line or fails on a surrogate.
        return json.dumps(entry, default=str)


def _quoted(fact: str) -> str:
    is_plain = fact.isprintable() and not any(mark in fact for mark in " \"'=")
    return fact if is_plain else json.dumps(fact, ensure_ascii=False)


def _as_text(failure: LoggedException) -> str:
    words = f": {failure.message}" if failure.message else ""
    places = " < ".join(map(_place, reversed(failure.frames)))
    return f"{failure.kind}{words} at {places}" if places else f"{failure.kind}{words}"


def _place(frame: Frame) -> str:
    return f"{frame.module}:{frame.line} {frame.function}"


def _as_object(failure: LoggedException) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": failure.kind}
    if failure.message:
        entry["message"] = failure.message
    entry["frames"] = [
        {"module": frame.module, "line": frame.line, "function": frame.function}
        for frame in failure.frames
    ]
    return entry
