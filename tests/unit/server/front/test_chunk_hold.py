"""How much text of a stream is held back, and how long, if its client asks for larger messages."""

from __future__ import annotations

import asyncio

import pytest

from penstock.scheduler.state import RequestState
from penstock.server.front.errors import ErrorReason, Failure, RequestError
from penstock.server.front.events import Progress, StreamEvent, TokensPiece
from penstock.server.front.generation import ChunkLimits
from penstock.server.front.stream import TokenStream
from support.timers import FakeTimers

PROGRESS = Progress(
    state=RequestState.PENDING, num_cached_prompt_tokens=0, num_preemptions=1, queue_s=0.0
)


def piece(text: str, index: int = 0, num_tokens: int = 1) -> TokensPiece:
    return TokensPiece(index, text, num_tokens, ())


def make(min_tokens: int = 3, max_delay_s: float = 0.5) -> tuple[TokenStream, FakeTimers]:
    timers = FakeTimers()
    return TokenStream(ChunkLimits(min_tokens=min_tokens, max_delay_s=max_delay_s), timers), timers


def emit(stream: TokenStream, *events: StreamEvent) -> str:
    """Report the events of one step; return the text that may be sent after it."""
    for event in events:
        stream.push(event)
    stream.wake()
    return text_of(stream.take_due())


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text if isinstance(event, TokensPiece) else "!" for event in events)


def test_the_first_token_is_sent_at_once_and_the_others_together() -> None:
    stream, timers = make()
    assert emit(stream, piece("a")) == "a"
    assert [emit(stream, piece(text)) for text in "bcdef"] == ["", "", "bcd", "", ""]
    assert stream.num_backlog_tokens == 2
    assert timers.num_set <= 2


def test_the_oldest_token_waits_no_longer_than_allowed() -> None:
    stream, timers = make()
    emit(stream, piece("a"))
    timers.advance(10.0)
    assert emit(stream, piece("b")) == ""
    timers.advance(0.4)
    assert emit(stream, piece("c")) == ""
    timers.advance(0.09)
    assert stream.take_due() == []
    timers.advance(0.01)
    assert text_of(stream.take_due()) == "bc"
    assert emit(stream, piece("d")) == "", "its own delay begins with it"
    timers.advance(0.5)
    assert text_of(stream.take_due()) == "d"


async def test_a_delay_that_has_passed_wakes_the_writer() -> None:
    stream, timers = make()
    emit(stream, piece("a"))
    taker = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    stream.push(piece("b"))
    stream.wake()
    await asyncio.sleep(0)
    assert not taker.done()
    timers.advance(0.5)
    assert await taker == [piece("b")]


def test_a_timer_is_set_for_a_chunk_and_never_for_each_token() -> None:
    stream, timers = make(min_tokens=50, max_delay_s=0.5)
    emit(stream, piece("a"))
    assert timers.num_set == 0, "nothing is held"
    for _ in range(20):
        for _ in range(50):
            emit(stream, piece("b"))
            timers.advance(0.001)
    assert stream.num_backlog_tokens == 0
    assert timers.num_set <= 20
    stream.close()
    assert timers.pending == []


def test_an_event_that_is_no_token_releases_held_text() -> None:
    stream, _ = make()
    emit(stream, piece("a"))
    assert emit(stream, piece("b"), PROGRESS) == "b!"
    assert emit(stream, piece("c")) == ""


def test_the_end_releases_held_text() -> None:
    for end in ("close", "fail"):
        stream, timers = make()
        emit(stream, piece("a"))
        assert emit(stream, piece("b")) == ""
        if end == "close":
            stream.close()
        else:
            stream.fail(Failure(reason=ErrorReason.ENGINE_DOWN))
        stream.wake()
        assert text_of(stream.take_due()) == "b"
        assert stream.is_drained
        assert timers.pending == []


async def test_the_end_wakes_a_writer_that_waits_for_more() -> None:
    stream, _ = make()
    taker = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    stream.abort(Failure(reason=ErrorReason.READER_STALLED))
    with pytest.raises(RequestError):
        await taker


def test_outputs_are_held_separately() -> None:
    stream, timers = make()
    assert emit(stream, piece("a", 0)) == "a"
    assert emit(stream, piece("A", 1)) == "A", "the first token of this output"
    assert emit(stream, piece("b", 0), piece("B", 1)) == ""
    timers.advance(0.3)
    assert emit(stream, piece("c", 0)) == ""
    assert emit(stream, piece("d", 0)) == "bcd"
    assert stream.num_backlog_tokens == 1
    assert emit(stream, piece("e", 0)) == ""
    timers.advance(0.2)
    assert text_of(stream.take_due()) == "B", "the other output's token is younger"
    timers.advance(0.3)
    assert text_of(stream.take_due()) == "e"


def test_an_output_that_ends_is_not_held_for_the_others() -> None:
    stream, _ = make()
    emit(stream, piece("a", 0), piece("A", 1))
    assert emit(stream, piece("b", 0)) == ""
    stream.release_held()
    stream.wake()
    assert text_of(stream.take_due()) == "b"
    assert emit(stream, piece("B", 1)) == ""


@pytest.mark.parametrize(("min_tokens", "max_delay_s"), [(1, 5.0), (5, 0.0)])
def test_limits_without_a_minimum_hold_no_text(min_tokens: int, max_delay_s: float) -> None:
    stream, timers = make(min_tokens, max_delay_s)
    assert [emit(stream, piece(text)) for text in "abc"] == ["a", "b", "c"]
    assert timers.num_set == 0


def test_credit_releases_the_text_that_it_covers_in_order() -> None:
    stream = TokenStream()
    for event in (PROGRESS, piece("a"), piece("b", num_tokens=2), piece("c"), PROGRESS):
        stream.push(event)
    assert text_of(stream.take_due(0)) == "!"
    assert text_of(stream.take_due(2)) == "a", "the next piece is larger than what is left"
    assert stream.num_backlog_tokens == 3
    assert text_of(stream.take_due(3)) == "bc!"
    assert stream.num_backlog_tokens == 0


def test_credit_for_what_is_due_in_a_held_stream() -> None:
    stream, timers = make()
    for text in "abcd":
        stream.push(piece(text))
    stream.wake()
    assert text_of(stream.take_due(2)) == "ab"
    assert text_of(stream.take_due(0)) == ""
    assert text_of(stream.take_due(9)) == "cd", "it was due before the credit came"
    assert emit(stream, piece("e")) == ""
    assert timers.num_set == 1
