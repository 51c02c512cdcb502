"""What a log line may have of an exception: its kind and frames always, its words seldom.

Owns the rule. An exception that rises while requests are handled may quote them in its words
("invalid literal: '...'"), so words are logged only where their author is known:

- our own exceptions, except those of the packages that deal with what clients wrote; behind a colon
  ours may quote what they were raised from, so that is cut off where there is such a thing;
- the system's errors, by their number;
- those of device drivers, which know nothing of requests.

Why a process cannot start is another matter: its one line has the words of whatever was loaded.
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
    """One place of a traceback; the module by its name, for paths name home directories."""

    module: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One exception. `words`: empty where they are not logged. `frames`: outermost first."""

    kind: str
    words: str
    frames: tuple[Frame, ...]


def failures_of(error: BaseException, *, has_foreign_text: bool) -> tuple[Failure, ...]:
    """The exception, then what it was raised from, and so on: at most `MAX_FAILURES`."""
    return tuple(
        Failure(
            kind=_kind_of(link),
            words=_words_of(link, has_foreign_text=has_foreign_text),
            frames=_frames_of(link.__traceback__),
        )
        for link in _chain_of(error, is_whole=False)
    )


def _chain_of(error: BaseException, *, is_whole: bool) -> Iterator[BaseException]:
    """`is_whole`: with those that `raise ... from None` hides; ours may quote them all the same."""
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
    """By number: its own words may be anybody's, as those of an SSL library's errors are."""
    if not isinstance(error.errno, int) or error.errno <= 0:
        return ""
    return os.strerror(error.errno)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # foreign code; a log line must not fail over it
        return ""


def _frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    """The innermost ones, if there are many."""
    frames: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        module = traceback.tb_frame.f_globals.get("__name__", code.co_filename)
        frames.append(
            Frame(module=str(module), line=traceback.tb_lineno, function=code.co_qualname)
        )
        traceback = traceback.tb_next
    return tuple(frames[-MAX_FRAMES:])
