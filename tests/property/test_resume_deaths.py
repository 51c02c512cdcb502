"""Engines die while requests move to other fronts: no request is lost or run twice."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.front_pair import Attempt, front_pair
from support.resumed import outputs_of, read_and_cancel, resumable, unbroken
from support.stepped_service import stepped


@pytest.fixture(scope="module")
def whole(text: ModelText) -> list[pb.GenerateResponse]:
    async def run() -> list[pb.GenerateResponse]:
        async with stepped(text) as service:
            return await service.end_of(service.stub.Generate(resumable(40)))

    return asyncio.run(run())


attempts = st.builds(
    Attempt,
    st.integers(0, 1),
    st.none() | st.integers(0, 14),
    st.booleans(),
    st.integers(0, 6),
)


async def disturbed(text: ModelText, what: list[Attempt]) -> list[pb.GenerateResponse]:
    async with front_pair(text) as site:
        first = site.fronts[0]
        got = await read_and_cancel(first, first.stub.Generate(resumable(40)), 5)
        for one in what:
            await site.attempt(got, one)
            if got[-1].HasField("finished"):
                break
        await site.finish(got)
        return got


@settings(
    max_examples=settings().max_examples // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(what=st.lists(attempts, max_size=5))
@example(what=[Attempt(1, turns, is_late=False, num_messages=3) for turns in (1, 2, 3)])
@example(what=[Attempt(1, turns, is_late=True, num_messages=3) for turns in (2, 3, 4)])
@example(what=[Attempt(n % 2, n, is_late=n > 3, num_messages=1) for n in range(8)])
def test_a_request_is_completed_despite_deaths_of_engines(
    text: ModelText, whole: list[pb.GenerateResponse], what: list[Attempt]
) -> None:
    got = asyncio.run(disturbed(text, what))
    assert unbroken(got)
    assert outputs_of(got) == outputs_of(whole)
