"""Which exception messages may be logged."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from penstock.scheduler.executor import ExecutorDied
from penstock.server.front.errors import ErrorReason, request_error
from penstock.server.ipc.wire import FrameError
from penstock.server.observe.logs.lines import MAX_FAILURES, MAX_FRAMES, failures_of
from penstock.server.text.errors import TextError

CANARY = "canary"


class OutOfMemoryError(RuntimeError):
    """Has the class name of the errors that device libraries raise."""


OutOfMemoryError.__module__ = "torch"


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError(CANARY)


def caught(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def raised(error: BaseException, origin: BaseException | None = None) -> BaseException:
    def act() -> None:
        if origin is None:
            raise error
        try:
            raise origin
        except type(origin) as known:
            raise error from known

    return caught(act)


def words(error: BaseException, *, has_exception_messages: bool = False) -> list[tuple[str, str]]:
    reported = failures_of(error, has_exception_messages=has_exception_messages)
    return [(failure.kind.rpartition(".")[2], failure.message) for failure in reported]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ValueError(CANARY), ""),
        (RuntimeError(CANARY), ""),
        (KeyError(CANARY), ""),
        (UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY), ""),
        (TextError(CANARY), ""),
        (request_error(ErrorReason.QUEUE_FULL), ""),
        (OSError(CANARY), ""),
        (OSError(errno.ENOSPC, CANARY, CANARY), "No space left on device"),
        (MemoryError("4 GiB"), "4 GiB"),
        (OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (ExecutorDied("the engine: said nothing"), "the engine: said nothing"),
        (FrameError("no hello"), "no hello"),
        (_UnprintableError(), ""),
    ],
)
def test_messages_are_logged_where_their_author_is_known(
    error: BaseException, reported: str
) -> None:
    assert words(raised(error))[0][1] == reported


def test_ours_are_cut_where_they_may_quote_what_they_come_from() -> None:
    foreign = RuntimeError(CANARY)
    died = raised(ExecutorDied(f"step 3: RuntimeError: {CANARY}"), foreign)
    assert words(died) == [("ExecutorDied", "step 3"), ("RuntimeError", "")]
    ours = raised(ExecutorDied("the engine died: it is not healthy"), FrameError("no hello"))
    assert words(ours) == [
        ("ExecutorDied", "the engine died: it is not healthy"),
        ("FrameError", "no hello"),
    ]


def test_an_origin_that_is_hidden_counts_and_is_not_reported() -> None:
    def act() -> None:
        try:
            int(CANARY)
        except ValueError as error:
            raise FrameError(f"no number: {error}") from None

    assert words(caught(act)) == [("FrameError", "no number")]


def test_with_the_switch_all_messages_are_logged() -> None:
    died = raised(ExecutorDied(f"step 3: {CANARY}"), RuntimeError(CANARY))
    assert words(died, has_exception_messages=True) == [
        ("ExecutorDied", f"step 3: {CANARY}"),
        ("RuntimeError", CANARY),
    ]


def test_groups_chains_and_circles_come_to_an_end() -> None:
    group = BaseExceptionGroup(CANARY, [ValueError(CANARY), KeyError(CANARY)])
    assert words(raised(group)) == [
        ("BaseExceptionGroup" if type(group) is BaseExceptionGroup else "ExceptionGroup", ""),
        ("ValueError", ""),
        ("KeyError", ""),
    ]
    first, second = ValueError(CANARY), KeyError(CANARY)
    first.__cause__, second.__cause__ = second, first
    assert len(words(first)) == 2
    error: BaseException = ValueError(CANARY)
    for _ in range(50):
        error = raised(ValueError(CANARY), error)
    assert len(words(error)) == MAX_FAILURES


def test_the_innermost_frames_of_many_are_listed() -> None:
    def down(depth: int) -> None:
        if not depth:
            raise ValueError(CANARY)
        down(depth - 1)

    (reported,) = failures_of(caught(lambda: down(100)), has_exception_messages=False)
    assert len(reported.frames) == MAX_FRAMES
    assert {frame.function.rpartition(".")[2] for frame in reported.frames} == {"down"}
