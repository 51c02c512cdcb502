"""Runs coroutines and asynchronous generators that never suspend, without an event loop.

The code that they call blocks the thread instead of suspending.
"""

import sys
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine that never suspends, and return its result. Raises RuntimeError if it
    suspends."""
    hooks = sys.get_asyncgen_hooks()
    if hooks.firstiter is None:
        return run_in_one_step(coroutine)
    # Otherwise the event loop of this thread would register the generators that begin here, to
    # close them later.
    sys.set_asyncgen_hooks(None, None)
    try:
        return run_in_one_step(coroutine)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def iterate(items: AsyncGenerator[ResultT, None]) -> Generator[ResultT, None, None]:
    """Yield the items of an asynchronous generator that never suspends. Closing the iterator closes
    the generator immediately."""
    try:
        while True:
            try:
                item = run(_next_of(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(_close(items))


async def _next_of(items: AsyncGenerator[ResultT, None]) -> ResultT:
    # This is a coroutine, because `anext` calls the hooks before anything is awaited.
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def run_in_one_step(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Same as `run`, for a coroutine that starts no asynchronous generators."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: ResultT = done.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine suspends, and no event loop runs it")
