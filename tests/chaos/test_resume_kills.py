"""Engines are killed while requests move to other fronts: no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from penstock.client import Client, Event, Finished, ResumePoint, TokenPrompt, Tokens
from support.service import simulated, started

NUM_REQUESTS = 40
NUM_KILLS = 3
OPTIONS: dict[str, Any] = {
    "max_tokens": 300,
    "seed": 11,
    "ignore_eos": True,
    "return_token_ids": True,
}
GRACE_S = 30.0


def ids_of(events: list[Event]) -> list[int]:
    return [record.id for event in events if isinstance(event, Tokens) for record in event.records]


async def begin(address: str, request_id: str, events: list[Event]) -> ResumePoint:
    """Read a few messages over a new connection, and close it."""
    point = ResumePoint(request_id=request_id)
    client = Client(address, resume_grace_s=GRACE_S)
    stream = client.generate(TokenPrompt(ids=(5, 6, 7)), request_id=request_id, **OPTIONS)
    async for event in stream:
        events.append(event)
        point = point.after(event)
        if len(events) == 6:
            break
    await client._calls.pool.close()  # pyright: ignore[reportPrivateUsage]
    return point


async def go_on(
    address: str, point: ResumePoint, events: list[Event], *, asked: asyncio.Semaphore
) -> None:
    """Resume over another connection, on the front that accepts it."""
    async with Client(address, resume_grace_s=GRACE_S) as client:
        asked.release()
        async for event in client.resume(point):
            events.append(event)


async def test_no_parked_request_is_lost_to_kills_during_hand_overs() -> None:
    async with started(*simulated(), "--fronts", "2") as service:
        engine = await service.next_pid("engine")
        told: list[list[Event]] = [[] for _ in range(NUM_REQUESTS)]
        points = await asyncio.gather(
            *(begin(service.address, f"r{n}", told[n]) for n in range(NUM_REQUESTS))
        )
        asked = asyncio.Semaphore(0)
        resumes: list[asyncio.Task[None]] = []
        num_each = NUM_REQUESTS // (NUM_KILLS + 1)
        for number, point in enumerate(points):
            resumes.append(
                asyncio.create_task(go_on(service.address, point, told[number], asked=asked))
            )
            # Those that were begun are somewhere between two fronts, each somewhere else.
            await asked.acquire()
            if (number + 1) % num_each == 0 and (number + 1) // num_each <= NUM_KILLS:
                os.kill(engine, signal.SIGKILL)
                engine = await service.next_pid("engine")
        await asyncio.gather(*resumes)
        whole = ids_of(told[0])
        assert len(whole) == OPTIONS["max_tokens"]
        for events in told:
            assert isinstance(events[-1], Finished)
            assert [event.sequence for event in events] == list(range(len(events)))
            assert ids_of(events) == whole
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
