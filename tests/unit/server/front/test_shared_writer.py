"""A writer shared by many streams takes all ready streams at once, can be woken when none is ready,
and ends when it is aborted.
"""

from __future__ import annotations

import asyncio

import pytest

from penstock.server.front.errors import ErrorReason, Failure, RequestError
from penstock.server.front.watched_write import SharedWriter

FAILURE = Failure(reason=ErrorReason.READER_STALLED)


async def test_takes_all_that_are_ready_in_one_turn() -> None:
    writer: SharedWriter[str] = SharedWriter()
    taker = asyncio.ensure_future(writer.take())
    await asyncio.sleep(0)
    for name in "cab":
        writer.mark(name)
    assert await taker == ["c", "a", "b"]
    writer.mark("d")
    assert await writer.take() == ["d"]


async def test_waking_returns_an_empty_list() -> None:
    writer: SharedWriter[str] = SharedWriter()
    taker = asyncio.ensure_future(writer.take())
    await asyncio.sleep(0)
    writer.wake()
    writer.wake()
    assert await taker == []


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_an_abort_ends_it_wherever_it_is(is_waiting: bool) -> None:
    writer: SharedWriter[str] = SharedWriter()
    writer.mark("late")
    outcome: list[bool] = []

    async def run() -> None:
        if is_waiting:
            await writer.take()
            await writer.take()
        writer.begin_write(1.0)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            outcome.append(writer.was_interrupted())
            await writer.take()

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    writer.abort(FAILURE)
    writer.abort(Failure(reason=ErrorReason.INTERNAL))
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.failure is FAILURE
    assert outcome == ([] if is_waiting else [True])
