"""Formats exceptions for log lines: always type and frames, the message only if it is safe.

Owns the rule. The message of an exception raised while handling a request may quote the request
("invalid literal: '...'"), so messages are logged only from these sources:

- our own exceptions, except those of packages that handle client data; the part after a colon may
  quote the exception's cause, so it is removed if there is one;
- errors of the operating system, by their number;
- errors of device drivers, which do not contain request data.

A process that cannot start logs the full message of the error in its one line.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import cast

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
    """One frame of a traceback; the module by its name, because paths contain home directories."""

    module: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One exception. `words`: its message, empty if not logged. `frames`: outermost first."""

    kind: str
    words: str
    frames: tuple[Frame, ...]


def failures_of(error: BaseException, *, has_foreign_text: bool) -> tuple[Failure, ...]:
    """The exception and its chain of causes: at most `MAX_FAILURES`."""
    return tuple(
        Failure(
            kind=_kind_of(link),
            words=_words_of(link, has_foreign_text=has_foreign_text),
            frames=_frames_of(link.__traceback__),
        )
        for link in _chain_of(error, is_whole=False)
    )


def _chain_of(error: BaseException, *, is_whole: bool) -> Iterator[BaseException]:
    """`is_whole`: include those hidden by `raise ... from None`, which ours may quote anyway."""
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
        if origin is None and (is_whole or not link.__suppress_context__):
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


def _words_of(error: BaseException, *, has_foreign_text: bool) -> str:
    if has_foreign_text or _is_a_drivers(error):
        return _text_of(error)
    if isinstance(error, OSError):
        return _words_of_system(error)
    if not _is_ours(error):
        return ""
    words = _text_of(error)
    origins = list(_chain_of(error, is_whole=True))[1:]
    return words if all(map(_is_ours, origins)) else words.partition(":")[0]


def _is_ours(error: BaseException) -> bool:
    module = f"{type(error).__module__}."
    return module.startswith(_OURS) and not module.startswith(_NEAR_CONTENT)


def _is_a_drivers(error: BaseException) -> bool:
    kind = type(error)
    return (kind.__module__, kind.__qualname__) in _DRIVERS


def _words_of_system(error: OSError) -> str:
    """The message for its number: its own text may come from another library, such as SSL."""
    if not isinstance(error.errno, int) or error.errno <= 0:
        return ""
    return os.strerror(error.errno)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # third-party code must not break a log line
        return ""


def _frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """The frames; only the innermost if there are many."""
    frames: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        module = traceback.tb_frame.f_globals.get("__name__", code.co_filename)
        frames.append(
            Frame(module=str(module), line=traceback.tb_lineno, function=code.co_qualname)
        )
        traceback = traceback.tb_next
    return tuple(frames[-MAX_FRAMES:])
