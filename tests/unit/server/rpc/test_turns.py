"""The event loop runs between parts of a response, and large messages take turns."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from penstock.server.rpc.generation_service import LoopYielder
from penstock.server.rpc.large_messages import LargeMessageQueue


async def test_the_event_loop_runs_between_short_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 0.0005)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    yielder = LoopYielder()
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    for _ in range(40):
        assert await yielder.collect(iter((b"part",))) == [b"part"]
    assert num_turns >= 5


NUM_ITERATIONS = 20


class Harness:
    """A queue of large messages, and a clock that advances while a message is handled."""

    def __init__(self, message_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.message_s = message_s
        self.large_messages = LargeMessageQueue(lambda: self.now_s)
        self.handled: list[str] = []

    def send(self, *callers: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._handle(caller)) for caller in callers]

    async def _handle(self, caller: str) -> None:
        await self.large_messages.acquire(caller)
        self.handled.append(caller)
        self.now_s += self.message_s


async def iterate() -> None:
    """Yield to the event loop often enough to run all tasks that do not wait for the clock."""
    for _ in range(NUM_ITERATIONS):
        await asyncio.sleep(0)


async def test_callers_take_turns() -> None:
    harness = Harness()
    await asyncio.gather(*harness.send("a", "a", "a", "b", "c", "b"))
    assert harness.handled == ["a", "b", "c", "a", "b", "a"]


async def test_the_next_large_message_waits_as_long_as_the_last_one_took() -> None:
    harness = Harness(message_s=3600.0)
    tasks = harness.send("a", "b")
    await iterate()
    assert harness.handled == ["a"], "the next waits as long as the last one took"
    assert tasks[0].done()
    tasks[1].cancel()


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    harness = Harness()
    first, gone, last = harness.send("a", "a", "b")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(first, last)
    assert harness.handled == ["a", "b"]
    await asyncio.gather(*harness.send("c"))
    assert harness.handled[-1] == "c"
