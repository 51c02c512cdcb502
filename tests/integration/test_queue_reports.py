"""The queue position and the predicted wait that a stream reports, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.client import Accepted, Client, Progress, RequestState, WaitReason
from penstock.scheduler.events import Admitted, Preempted, Queued
from penstock.scheduler.events import WaitReason as Reason
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from support.fronts import ServedFront, admitted, queued, serving
from support.timeout import TEST_TIMEOUT_S

LATE = FrontConfig(acceptance_delay_s=600.0)


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    """Provide a front that waits for the engine's report without a time limit."""
    async with serving(text, LATE) as served:
        yield served


class EventStream:
    """The events of one stream, as the Python client returns them."""

    def __init__(self, client: Client, *, n: int = 1) -> None:
        self._events = client.generate("hello", n=n)

    async def next(self) -> object:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await anext(self._events)

    async def rest(self) -> list[object]:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return [event async for event in self._events]


def shape(events: list[object]) -> list[tuple[RequestState, int | None, float | None]]:
    return [
        (event.state, event.queue_position, event.estimated_queue_s)
        for event in events
        if isinstance(event, Progress)
    ]


async def test_a_waiting_request_receives_its_time_and_its_position(served: ServedFront) -> None:
    async with Client(served.address) as client:
        stream = EventStream(client)
        first = asyncio.ensure_future(stream.next())
        (spec,) = await served.port.next_submission()
        served.port.emit(changes=[queued(spec.key, 3, 2.5, Reason.BLOCKS)])
        accepted = await first
        assert isinstance(accepted, Accepted)
        assert accepted.estimated_queue_s == 2.5
        place = await stream.next()
        assert isinstance(place, Progress)
        assert place.wait_reason is WaitReason.BLOCKS
        assert shape([place]) == [(RequestState.PENDING, 3, 2.5)]
        served.port.admit(spec.key)
        served.port.finish(spec.key)
        assert shape(await stream.rest()) == [(RequestState.PROCESSING, None, None)]


@pytest.mark.parametrize("num_ahead", [0, 3])
async def test_a_request_that_runs_at_once_has_no_queue_events(
    served: ServedFront, num_ahead: int
) -> None:
    async with Client(served.address) as client:
        stream = EventStream(client)
        first = asyncio.ensure_future(stream.next())
        (spec,) = await served.port.next_submission()
        served.port.emit(changes=[queued(spec.key, num_ahead, 0.0), admitted(spec.key)])
        accepted = await first
        assert isinstance(accepted, Accepted)
        assert accepted.estimated_queue_s == 0.0
        served.port.finish(spec.key)
        assert shape(await stream.rest()) == [(RequestState.PROCESSING, None, None)]


async def test_the_next_in_the_queue_is_accepted_and_no_more(served: ServedFront) -> None:
    async with Client(served.address) as client:
        stream = EventStream(client)
        first = asyncio.ensure_future(stream.next())
        (spec,) = await served.port.next_submission()
        served.port.emit(changes=[queued(spec.key, 0, None)])
        accepted = await first
        assert isinstance(accepted, Accepted)
        assert accepted.estimated_queue_s is None
        served.port.finish(spec.key)
        assert shape(await stream.rest()) == []


async def test_a_queue_position_that_arrives_late_is_reported(text: ModelText) -> None:
    async with serving(text) as served, Client(served.address) as client:
        stream = EventStream(client)
        first = asyncio.ensure_future(stream.next())
        (spec,) = await served.port.next_submission()
        accepted = await first
        assert isinstance(accepted, Accepted)
        assert accepted.estimated_queue_s is None, "the engine had not said anything yet"
        served.port.emit(changes=[queued(spec.key, 1, 0.5)])
        assert shape([await stream.next()]) == [(RequestState.PENDING, 1, 0.5)]
        served.port.finish(spec.key)
        await stream.rest()


async def test_several_outputs_are_accepted_once_and_a_position_is_sent_once(
    served: ServedFront,
) -> None:
    async with Client(served.address) as client:
        stream = EventStream(client, n=2)
        first = asyncio.ensure_future(stream.next())
        leader, other = await served.port.next_submission()
        changes: list[Queued | Admitted | Preempted] = [
            queued(leader.key, 2, 1.0),
            queued(other.key, 3, 9.0),
        ]
        served.port.emit(changes=changes)
        assert isinstance(await first, Accepted)
        assert shape([await stream.next()]) == [(RequestState.PENDING, 2, 1.0)]
        served.port.emit(changes=[admitted(leader.key)])
        served.port.emit(changes=[queued(leader.key, 7, 1.0)])
        served.port.finish(leader.key)
        served.port.finish(other.key)
        rest = await stream.rest()
        assert not [event for event in rest if isinstance(event, Accepted)]
        assert (RequestState.PENDING, 7, 1.0) not in shape(rest), "it runs: there is no place"
