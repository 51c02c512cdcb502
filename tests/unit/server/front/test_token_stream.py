"""What a stream holds until it is read, in which parts it is read, and how it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import ErrorReason, Failure, RequestError
from penstock.server.front.events import (
    PromptPiece,
    StreamEvent,
    TokenRecord,
    TokensPiece,
    TopToken,
)
from penstock.server.front.stream import TokenStream
from penstock.server.front.stream_head import EchoedPrompt

FAILURE = Failure(reason=ErrorReason.ENGINE_DOWN)


def piece(text: str) -> TokensPiece:
    return TokensPiece(0, text, 1, ())


async def test_take_returns_everything_at_once_and_then_waits() -> None:
    stream = TokenStream()
    for text in "abc":
        stream.push(piece(text))
    assert stream.num_backlog_tokens == 3
    assert await stream.take() == [piece("a"), piece("b"), piece("c")]
    assert stream.num_backlog_tokens == 0
    taker = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    assert not taker.done()
    stream.push(piece("d"))
    stream.wake()
    assert await taker == [piece("d")]


async def test_a_token_alone_is_taken_as_text_or_as_an_event() -> None:
    stream = TokenStream()
    assert stream.take_text() is None
    stream.push_text("a")
    assert stream.num_backlog_tokens == 1
    assert not stream.is_drained
    assert stream.take_text() == "a"
    assert stream.num_backlog_tokens == 0
    stream.push_text("b")
    assert stream.take_due(0) == []
    assert await stream.take() == [piece("b")]
    stream.push_text("")
    assert stream.take_text() == "", "a token whose text comes later is one as well"


async def test_text_among_other_events_keeps_its_place() -> None:
    stream = TokenStream()
    stream.push(PromptPiece(text="p"))
    stream.push_text("a")
    assert stream.take_text() is None
    assert stream.take_due() == [PromptPiece(text="p"), piece("a")]
    stream.push_text("a")
    stream.push_text("b")
    assert stream.take_text() is None
    stream.push(PromptPiece(text="p"))
    assert stream.take_due() == [piece("a"), piece("b"), PromptPiece(text="p")]
    stream.push_text("a")
    stream.push(PromptPiece(text="p"))
    assert stream.take_due() == [piece("a"), PromptPiece(text="p")]


async def test_text_is_dropped_by_an_abort_and_after_an_end() -> None:
    stream = TokenStream()
    stream.push_text("a")
    stream.close()
    stream.push_text("late")
    before = stream.is_drained
    stream.abort(FAILURE)
    assert (before, stream.is_drained) == (False, True)
    assert stream.take_text() is None


async def test_waking_without_events_continues_waiting() -> None:
    stream = TokenStream()
    taker = asyncio.ensure_future(stream.take())
    for _ in range(3):
        await asyncio.sleep(0)
        stream.wake()
    assert not taker.done()
    stream.close()
    stream.wake()
    assert await taker == []


async def test_events_before_a_failure_are_delivered_first() -> None:
    stream = TokenStream()
    stream.push(piece("a"))
    stream.fail(FAILURE)
    stream.push(piece("late"))
    assert await stream.take() == [piece("a")]
    with pytest.raises(RequestError):
        await stream.take()
    with pytest.raises(RequestError):
        await stream.take()


async def test_only_the_first_end_is_delivered() -> None:
    stream = TokenStream()
    stream.close()
    stream.fail(FAILURE)
    assert await stream.take() == []


class BlockedWriter:
    """Starts writes to a stream that block. `outcomes`: for each cancelled write, whether an abort
    of the stream cancelled it.
    """

    def __init__(self, stream: TokenStream) -> None:
        self.outcomes: list[bool] = []
        self._stream = stream
        self._blocked = asyncio.Event()

    async def write(self) -> asyncio.Task[None]:
        """Start a write; return its task once it blocks."""
        self._blocked.clear()
        task = asyncio.create_task(self._write())
        await self._blocked.wait()
        return task

    async def _write(self) -> None:
        self._stream.begin_write(1.0)
        self._blocked.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.outcomes.append(self._stream.was_interrupted())


async def test_abort_drops_the_backlog_and_cancels_a_blocked_writer() -> None:
    stream = TokenStream()
    writer = BlockedWriter(stream)
    task = await writer.write()
    stream.push(piece("a"))
    stream.abort(FAILURE)
    stream.abort(FAILURE)
    await task
    assert writer.outcomes == [True]
    assert not task.cancelled()
    with pytest.raises(RequestError):
        await stream.take()


async def test_a_disconnected_peer_is_distinguished_from_a_closed_stream() -> None:
    stream = TokenStream()
    writer = BlockedWriter(stream)
    task = await writer.write()
    task.cancel()
    await asyncio.wait([task])
    both = await writer.write()
    stream.abort(FAILURE)
    both.cancel()
    await asyncio.wait([both])
    assert writer.outcomes == [False, False]


async def test_abort_wakes_a_writer_that_waits_for_events() -> None:
    stream = TokenStream()
    taker = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    stream.abort(FAILURE)
    with pytest.raises(RequestError):
        await taker


async def test_only_tokens_count_as_backlog() -> None:
    stream = TokenStream()
    stream.push(PromptPiece(text="p"))
    assert stream.num_backlog_tokens == 0
    assert stream.blocked_since_s == NO_TIME


async def test_a_large_backlog_is_taken_in_parts() -> None:
    """Writing a long prompt or many events at once would block the event loop for all other
    requests.
    """
    stream = TokenStream()
    parts = list(EchoedPrompt(np.arange(20_000, dtype=np.int32), "x" * 100_000).head())
    tops = tuple(TopToken(i, -1.0) for i in range(20))
    pieces = [TokensPiece(0, "x", 1, (TokenRecord(1, -1.0, 1, tops),)) for _ in range(1000)]
    events: list[StreamEvent] = [*parts, *pieces]
    for event in events:
        stream.push(event)
    updates = 0
    taken: list[StreamEvent] = []

    def on_update() -> None:
        nonlocal updates
        updates += 1
        batch = stream.take_due()
        assert len(batch) < 300
        assert sum(isinstance(event, PromptPiece) for event in batch) <= 2, "a whole one and a rest"
        taken.extend(batch)

    stream.attach(on_update)
    stream.close()
    stream.wake()
    assert updates == 1
    for _ in range(len(parts) + len(pieces)):
        await asyncio.sleep(0)
    assert stream.is_drained
    assert taken == [*parts, *pieces]
    assert stream.num_backlog_tokens == 0


async def test_text_without_records_is_taken_at_once() -> None:
    stream = TokenStream()
    for _ in range(1000):
        stream.push(piece("x"))
    assert len(stream.take_due()) == 1000
