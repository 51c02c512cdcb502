"""The client's coroutines run in a thread without an event loop: they return results or raise
errors, iterators can be closed early, and a running loop of the thread is not affected.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator

import pytest

from penstock.client.without_loop import iterate, run


async def letters(ends: list[str]) -> AsyncGenerator[str, None]:
    try:
        for letter in "abc":
            yield letter
    finally:
        ends.append("closed")


async def joined() -> str:
    return "".join([letter async for letter in letters([])])


async def failing() -> None:
    raise KeyError("gone")


def test_results_and_errors_are_returned() -> None:
    assert run(joined()) == "abc"
    with pytest.raises(KeyError):
        run(failing())


def test_a_coroutine_that_waits_raises() -> None:
    with pytest.raises(RuntimeError, match="no event loop"):
        run(asyncio.sleep(0))


def test_closing_an_iterator_early_closes_its_generator_at_once() -> None:
    ends: list[str] = []
    items = iterate(letters(ends))
    assert next(items) == "a"
    items.close()
    assert ends == ["closed"]


async def test_a_running_loop_of_the_thread_does_not_manage_the_generators() -> None:
    """A running event loop sets hooks for async generators, which would close the client's
    generators only when that loop ends.
    """
    hooks = sys.get_asyncgen_hooks()
    seen: list[object] = []
    sys.set_asyncgen_hooks(seen.append, hooks.finalizer)
    try:
        assert list(iterate(letters([]))) == ["a", "b", "c"]
        assert run(joined()) == "abc"
    finally:
        watched = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(*hooks)
    assert seen == []
    assert watched.firstiter == seen.append
