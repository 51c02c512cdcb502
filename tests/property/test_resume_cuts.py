"""Streams that are cut at any point, any number of times, and resumed on any front, are complete at
the client.

Each example draws a request and the points where its connection breaks or its front is lost. It
runs in one process, with real sockets and a real engine whose steps the test runs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.resumed import num_tokens_of, outputs_of, read_some, resumable, resume_after, unbroken
from support.stepped_service import SteppedService, another_front, stepped


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Draw a greedy or seeded request of one or several outputs, with any output options."""
    message = resumable(
        draw(st.integers(1, 40)),
        prompt=draw(st.lists(st.integers(3, 400), min_size=1, max_size=40)),
    )
    sampling, output = message.sampling, message.output
    if draw(st.booleans()):
        sampling.temperature, sampling.seed = 1.0, draw(st.integers(0, 2**63))
        sampling.num_outputs = draw(st.integers(1, 3))
    output.return_token_ids = draw(st.booleans())
    if draw(st.booleans()):
        output.logprobs = draw(st.integers(0, 2))
    if draw(st.booleans()):
        output.echo = True
    if draw(st.booleans()):
        output.min_chunk_tokens = draw(st.integers(2, 8))
        output.max_chunk_delay.FromSeconds(10)
    if draw(st.booleans()):
        message.stopping.stop_strings.extend(
            draw(st.lists(st.sampled_from("aeiourst "), max_size=2))
        )
        message.stopping.min_tokens = min(message.stopping.max_tokens, 5)
    return message


cuts = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=4)
"""Messages read before a cut, steps after it, and whether Resume goes to the other front."""


async def remaining_events(
    service: SteppedService, call: Any, num_messages: int
) -> tuple[list[pb.GenerateResponse], bool]:
    """Read up to `num_messages` messages of a call; return them, and whether the call ended."""
    responses: list[pb.GenerateResponse] = []
    for _ in range(num_messages):
        try:
            (message,) = await read_some(service, call, 1)
        except StopAsyncIteration:
            return responses, True
        responses.append(message.response if isinstance(message, pb.ResumeResponse) else message)
    return responses, False


def after(got: list[pb.GenerateResponse], message: pb.GenerateRequest) -> pb.ResumeRequest:
    """Return the Resume request for the rest of the stream. Removes a partial echo from `got`,
    because a client cannot know how long the echo is.
    """
    if message.output.echo and not any(num_tokens_of(got, message.sampling.num_outputs or 1)):
        del got[1:]
    return resume_after(got, message.sampling.num_outputs or 1)


async def undisturbed(text: ModelText, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with stepped(text) as service:
        return await service.end_of(service.stub.Generate(message))


async def cut(
    text: ModelText, message: pb.GenerateRequest, cut_at: list[tuple[int, int, bool]]
) -> list[pb.GenerateResponse]:
    """Return all messages that a client receives if it resumes after each cut.

    `cut_at`: for each cut, (number of messages read before it, number of steps run after it,
    whether the client resumes on the other front).
    """
    async with stepped(text) as first, another_front(first) as second:
        fronts = [first, second]
        call: Any = first.stub.Generate(message)
        got, is_whole = await remaining_events(first, call, 1)
        for num_messages, num_steps, is_other in cut_at:
            here = fronts[0]
            more, is_whole = await remaining_events(here, call, num_messages)
            got += more
            if is_whole:
                break
            call.cancel()
            await here.until(lambda here=here: not here.server.num_active_calls)  # type: ignore[misc]
            first.step(num_steps)
            if is_other:
                fronts.reverse()
            call = fronts[0].stub.Resume(after(got, message))
        while not is_whole:
            more, is_whole = await remaining_events(fronts[0], call, 100)
            got += more
        assert not first.server.num_live_requests
        assert not second.server.num_live_requests
        first.step(2)
        assert first.is_clean()
        return got


async def lost(
    text: ModelText, message: pb.GenerateRequest, num_messages: int, num_steps: int
) -> list[pb.GenerateResponse]:
    """Return all messages that a client receives if it loses its front after it has read 1 +
    `num_messages` messages and the engine has run `num_steps` further steps.
    """
    async with stepped(text) as first, another_front(first) as second:
        call = first.stub.Generate(message)
        got, is_whole = await remaining_events(first, call, 1 + num_messages)
        if is_whole:
            return got
        first.step(num_steps)
        await first.disconnect()
        rest: list[Any] = await second.end_of(second.stub.Resume(after(got, message)))
        return [*got, *(message.response for message in rest)]


slow = settings(
    max_examples=settings().max_examples // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@slow
@given(message=requests(), cut_at=cuts)
def test_resumed_streams_are_complete(
    text: ModelText, message: pb.GenerateRequest, cut_at: list[tuple[int, int, bool]]
) -> None:
    whole = asyncio.run(undisturbed(text, message))
    got = asyncio.run(cut(text, message, cut_at))
    assert unbroken(got)
    assert outputs_of(got) == outputs_of(whole)


@slow
@given(message=requests(), num_messages=st.integers(0, 20), num_steps=st.integers(0, 10))
def test_streams_of_lost_fronts_are_complete(
    text: ModelText, message: pb.GenerateRequest, num_messages: int, num_steps: int
) -> None:
    whole = asyncio.run(undisturbed(text, message))
    got = asyncio.run(lost(text, message, num_messages, num_steps))
    assert unbroken(got)
    assert outputs_of(got) == outputs_of(whole)
