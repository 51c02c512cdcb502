"""The event loop runs between the parts of a response, however they are batched."""

import asyncio
import itertools
import time

import pytest

from penstock.server.rpc.generation_service import LoopTurns


async def test_the_loop_turns_between_batches_that_are_short_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 0.0005)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    turns = LoopTurns()
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    for _ in range(40):
        assert await turns.make(iter((b"part",))) == [b"part"]
    assert num_turns >= 5
