"""Runs coroutines and asynchronous generators that never suspend, without an event loop.

Steps coroutines; the code that it steps blocks its thread instead of suspending.
"""

import sys
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of a coroutine that never suspends. Raises RuntimeError if it suspends."""
    hooks = sys.get_asyncgen_hooks()
    if hooks.firstiter is None:
        return _step(coroutine)
    # The event loop of this thread would otherwise adopt generators that begin here.
    sys.set_asyncgen_hooks(None, None)
    try:
        return _step(coroutine)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def iterate(items: AsyncGenerator[ResultT, None]) -> Generator[ResultT, None, None]:
    """Yield the items of a generator that never suspends; leaving early closes it at once."""
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
    # A coroutine, because `anext` calls the hooks before anything is awaited.
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def _step(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: ResultT = done.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine waits, and there is no event loop to wait in")
