"""Cases 24 and 27: fronts and engines are killed during resumable streams, which continue with the
same tokens.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from penstock.client import Client, Event, Finished, ResumePoint, TokenPrompt, Tokens
from support.service import Service, simulated, started

OPTIONS: dict[str, Any] = {
    "max_tokens": 300,
    "seed": 11,
    "ignore_eos": True,
    "return_token_ids": True,
}
NUM_STREAMS = 12
NUM_REQUESTS = 40
NUM_KILLS = 3
RESUME_TIMEOUT_S = 30.0


def ids_of(events: list[Event]) -> list[int]:
    assert isinstance(events[-1], Finished)
    return [record.id for event in events if isinstance(event, Tokens) for record in event.records]


async def read(address: str, first: int, *, begun: asyncio.Event | None = None) -> list[Event]:
    """Read one stream over a separate connection; return all events. `begun` is set at the tenth
    event.
    """
    events: list[Event] = []
    async with Client(address, resume_timeout_s=RESUME_TIMEOUT_S) as client:
        async for event in client.generate(TokenPrompt(ids=(first, 6, 7)), **OPTIONS):
            events.append(event)
            if begun is not None and len(events) == 10:
                begun.set()
    assert [event.sequence for event in events] == list(range(len(events)))
    return events


async def begin(address: str, request_id: str, events: list[Event]) -> ResumePoint:
    """Read six events over a connection, then close it without a cancel, as a killed client does;
    return the resume point.
    """
    point = ResumePoint(request_id=request_id)
    client = Client(address, resume_timeout_s=RESUME_TIMEOUT_S)
    stream = client.generate(TokenPrompt(ids=(5, 6, 7)), request_id=request_id, **OPTIONS)
    async for event in stream:
        events.append(event)
        point = point.after(event)
        if len(events) == 6:
            break
    await client._calls.pool.close()  # pyright: ignore[reportPrivateUsage]
    return point


async def continue_stream(
    address: str, point: ResumePoint, events: list[Event], *, asked: asyncio.Semaphore
) -> None:
    """Resume at `point` over another connection, on any front, and append the events to `events`.
    `asked` is released just before the call.
    """
    async with Client(address, resume_timeout_s=RESUME_TIMEOUT_S) as client:
        asked.release()
        async for event in client.resume(point):
            events.append(event)


async def fronts_of(service: Service, num_fronts: int) -> list[int]:
    return [await service.next_pid("front") for _ in range(num_fronts)]


async def test_case_27_streams_of_killed_fronts_continue() -> None:
    async with started(*simulated(), "--fronts", "2") as service:
        pids = await fronts_of(service, 2)
        undisturbed = await asyncio.gather(
            *(read(service.address, 5 + one) for one in range(NUM_STREAMS))
        )
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(read(service.address, 5 + one, begun=begun[one]))
            for one in range(NUM_STREAMS)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        for pid in pids:  # one after the other, so that each stream loses one at least
            os.kill(pid, signal.SIGKILL)
            await service.next_pid("front")
        disturbed = await asyncio.gather(*streams)
        assert [ids_of(events) for events in disturbed] == [
            ids_of(events) for events in undisturbed
        ]
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_case_24_detached_requests_survive_the_engine() -> None:
    async with started(*simulated(), "--fronts", "1") as service:
        engine = await service.next_pid("engine")
        undisturbed = await read(service.address, 5)
        events: list[Event] = []
        point = await begin(service.address, "r", events)
        os.kill(engine, signal.SIGKILL)
        await service.next_pid("engine")
        async with Client(service.address, resume_timeout_s=RESUME_TIMEOUT_S) as another:
            rest = [event async for event in another.resume(point)]
        assert ids_of([*events, *rest]) == ids_of(undisturbed)


async def test_a_service_that_drains_does_not_wait_for_unread_streams() -> None:
    async with started(*simulated(), "--fronts", "1", "--drain-timeout-s", "20") as service:
        await fronts_of(service, 1)
        client = Client(service.address, resume_timeout_s=RESUME_TIMEOUT_S)
        options = {**OPTIONS, "max_tokens": 900}
        stream = client.generate(TokenPrompt(ids=(5, 6, 7)), **options)
        await anext(stream)
        await client._calls.pool.close()  # pyright: ignore[reportPrivateUsage]
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_kills_during_transfers_lose_no_detached_request() -> None:
    async with started(*simulated(), "--fronts", "2") as service:
        engine = await service.next_pid("engine")
        reported: list[list[Event]] = [[] for _ in range(NUM_REQUESTS)]
        points = await asyncio.gather(
            *(begin(service.address, f"r{n}", reported[n]) for n in range(NUM_REQUESTS))
        )
        asked = asyncio.Semaphore(0)
        resumes: list[asyncio.Task[None]] = []
        num_each = NUM_REQUESTS // (NUM_KILLS + 1)
        for number, point in enumerate(points):
            resumes.append(
                asyncio.create_task(
                    continue_stream(service.address, point, reported[number], asked=asked)
                )
            )
            # The requests that were begun are at different points of their way between two fronts.
            await asked.acquire()
            if (number + 1) % num_each == 0 and (number + 1) // num_each <= NUM_KILLS:
                os.kill(engine, signal.SIGKILL)
                engine = await service.next_pid("engine")
        await asyncio.gather(*resumes)
        whole = ids_of(reported[0])
        assert len(whole) == OPTIONS["max_tokens"]
        for events in reported:
            assert [event.sequence for event in events] == list(range(len(events)))
            assert ids_of(events) == whole
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
