"""Calls that attach a stream to a front and wait for the engine's answer."""

from __future__ import annotations

import asyncio

import pytest

from penstock.server.ipc.attach_calls import AttachCalls
from penstock.server.ipc.frames import Attach, Attached
from penstock.server.ipc.ports import EngineUnavailable


def answer(calls: AttachCalls, frame: Attach) -> None:
    calls.pending.resolve(frame.ticket, Attached(ticket=frame.ticket, resume_spec=None))


async def test_one_call_per_stream_is_at_the_engine() -> None:
    sent: list[Attach] = []
    calls = AttachCalls(sent.append)
    answers: list[Attached] = []
    waiting = [asyncio.create_task(calls.attach(name, answers.append)) for name in "aaba"]
    for _ in range(8):
        await asyncio.sleep(0)
    assert [frame.name for frame in sent] == ["a", "b"]
    answered = 0
    while answered < len(waiting):
        answer(calls, sent[answered])
        answered += 1
        for _ in range(8):  # the next call of the stream writes its frame
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert [frame.name for frame in sent] == ["a", "b", "a", "a"]
    assert [answer.ticket for answer in answers] == [frame.ticket for frame in sent]


async def test_a_cancelled_caller_sends_no_more_calls_and_its_answer_is_still_received() -> None:
    sent: list[Attach] = []
    was_sent = asyncio.Event()

    def write(frame: Attach) -> None:
        sent.append(frame)
        was_sent.set()

    calls = AttachCalls(write)
    answers: list[Attached] = []
    asked, waiting = (asyncio.create_task(calls.attach("a", answers.append)) for _ in range(2))
    await asyncio.sleep(0)
    asked.cancel()
    waiting.cancel()
    await asyncio.wait((asked, waiting))
    later = asyncio.create_task(calls.attach("a", answers.append))
    await asyncio.sleep(0)
    assert len(sent) == 1, "the engine has not answered the first"
    was_sent.clear()
    answer(calls, sent[0])
    await was_sent.wait()
    answer(calls, sent[1])
    await later
    assert len(answers) == len(sent) == 2


async def test_a_response_that_cannot_be_applied_fails_its_own_call() -> None:
    sent: list[Attach] = []
    was_sent = asyncio.Event()

    def write(frame: Attach) -> None:
        sent.append(frame)
        was_sent.set()

    def fail(_: Attached) -> None:
        raise ValueError("not applied")

    calls = AttachCalls(write)
    answers: list[Attached] = []
    first = asyncio.create_task(calls.attach("a", fail))
    second = asyncio.create_task(calls.attach("a", answers.append))
    await was_sent.wait()
    was_sent.clear()
    answer(calls, sent[0])
    with pytest.raises(ValueError, match="not applied"):
        await first
    await was_sent.wait()
    answer(calls, sent[1])
    await second
    assert len(answers) == 1


async def test_all_calls_of_a_stream_fail_with_the_engine() -> None:
    is_up = True

    def write(_: Attach) -> None:
        if not is_up:
            raise EngineUnavailable("down")

    calls = AttachCalls(write)
    waiting = [asyncio.create_task(calls.attach("a", lambda _: None)) for _ in range(2)]
    await asyncio.sleep(0)
    is_up = False
    calls.pending.fail(EngineUnavailable("lost"))
    for call in waiting:
        with pytest.raises(EngineUnavailable):
            await call
