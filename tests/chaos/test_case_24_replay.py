"""Case 24: engines are killed during streams, which deliver the same tokens as without
the kills.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

from penstock.client import (
    NO_RETRY,
    Client,
    Event,
    Finished,
    PoolConfig,
    Progress,
    RequestState,
    Tokens,
)
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

NUM_STREAMS = 32
NUM_TOKENS = 600
KILLED_AT = (60, 120, 180, 240)
"""The engine is killed each time that the first stream has so many tokens. Enough tokens remain
after the last kill that it precedes the stream's end, even on a busy machine.
"""


def asked(number: int) -> dict[str, Any]:
    """Return the arguments of a request: a greedy one if `number` is even, a sampled one if it is
    odd.
    """
    return {
        "prompt": (5 + number, 6, 7, 8),
        "temperature": float(number % 2),
        "seed": number,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "deadline_s": TEST_TIMEOUT_S,
    }


def ids_of(events: Sequence[Event]) -> list[int]:
    return [record.id for event in events if isinstance(event, Tokens) for record in event.records]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def num_returns(events: Sequence[Event]) -> int:
    """Return how often the request was reported PENDING after its first token."""
    first = next(at for at, event in enumerate(events) if isinstance(event, Tokens))
    return sum(
        isinstance(event, Progress) and event.state is RequestState.PENDING
        for event in events[first:]
    )


async def read(client: Client, number: int, events: list[Event], updates: asyncio.Event) -> None:
    """Read a stream to its end into `events`; check that no message is missing or duplicated."""
    async for event in client.generate(**asked(number)):
        events.append(event)
        updates.set()
    assert [event.sequence for event in events] == list(range(len(events)))
    assert [isinstance(event, Finished) for event in events].count(True) == 1


async def all_streams(service: Service, kills: Sequence[int]) -> list[list[Event]]:
    """Run all streams to their end; return the events of each stream.

    Each entry of `kills` is a number of tokens: an engine is killed once the first stream has that
    many.
    """
    reported: list[list[Event]] = [[] for _ in range(NUM_STREAMS)]
    updates = asyncio.Event()
    async with (
        Client(service.address, pool=PoolConfig(num_channels=4), retry=NO_RETRY) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, events in enumerate(reported):
            group.create_task(read(client, number, events, updates))
        for num_tokens in kills:
            engine = await service.next_pid("engine")
            async with asyncio.timeout(TEST_TIMEOUT_S):
                while len(ids_of(reported[0])) < num_tokens:
                    updates.clear()
                    await updates.wait()
            os.kill(engine, signal.SIGKILL)
    return reported


async def test_case_24_killed_engines_only_delay_streams() -> None:
    async with started(*simulated(), "--fronts", "2", "--max-num-seqs", "24") as service:
        # The fifth death within a minute makes the service give up.
        disturbed = await all_streams(service, KILLED_AT)
        await service.next_pid("engine")
        undisturbed = await all_streams(service, [])
        for one, other in zip(undisturbed, disturbed, strict=True):
            assert len(ids_of(one)) == NUM_TOKENS
            assert ids_of(other) == ids_of(one)
            assert text_of(other) == text_of(one)
        # Those that ran from the first step on were in the batch at every death.
        assert num_returns(disturbed[0]) >= len(KILLED_AT)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_case_24_unary_and_multiplexed_requests_survive_killed_engines() -> None:
    async with (
        started(*simulated()) as service,
        Client(service.address, retry=NO_RETRY) as client,
        Client(service.address, multiplex=True, retry=NO_RETRY) as multiplexed,
    ):
        engine = await service.next_pid("engine")
        once = asyncio.create_task(client.generate_once(**asked(1)))
        many: list[Event] = []
        is_dead = False
        async for event in multiplexed.generate(**asked(2)):
            many.append(event)
            if len(ids_of(many)) > NUM_TOKENS // 4 and not is_dead:
                os.kill(engine, signal.SIGKILL)
                is_dead = True
        assert is_dead
        (output,) = (await once).outputs
        again: list[list[Event]] = [[], []]
        for number, events in zip((1, 2), again, strict=True):
            await read(client, number, events, asyncio.Event())
        reported = [[record.id for record in output.records], ids_of(many)]
        assert reported == [ids_of(events) for events in again]
