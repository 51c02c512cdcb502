"""The effect of many cancels, and of malformed requests.

Contains the sections cancel and malformed of the survival benchmark.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio
import numpy as np

from cancel_steps import STEP_S, cancels_counted
from penstock.client import OperationsClient
from report import Check, at_most, print_table, progress
from services import MEASURED, Ready, Service, capacity, service, simulated
from stream_memory import churn, resident_bytes
from survival_streams import ConcurrentStreams, connections, request

GENERATE = "/penstock.v1.GenerationService/Generate"
_ALLOWED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND", "UNIMPLEMENTED"}
_NUM_CALLERS = 64
_WARM_REQUESTS = 1000
_MAX_GROWTH_BYTES = 200.0
"""Maximum growth of the front's memory per cancelled stream; gRPC's core keeps 100 to 130 bytes."""


async def _used_blocks(address: str) -> int:
    """Return the number of used KV blocks after all clients have disconnected; these are leaked."""
    async with OperationsClient(address) as client:
        used = -1
        for _ in range(100):
            stats = await client.get_stats()
            used = sum(model.cache.num_used_blocks for model in stats.models)
            if not used:
                break
            await asyncio.sleep(0.1)
        return used


async def cancel(num_cancels: int) -> tuple[list[Any], list[Check]]:
    """Measure how soon KV blocks are free after a cancel; then run many clients that disconnect
    after their first token.
    """
    progress("cancel")
    freed = np.array([one for depth in (1, 2) for one in await cancels_counted(1600, depth)])
    steps, free_ms = freed[:, 0], freed[:, 1] * 1e3
    options = (*simulated(0.001), *capacity(64, 64), *MEASURED)
    with service(*options, has_operations=True) as serving:
        port, fronts = serving.port, serving.pids("front")
        await asyncio.to_thread(churn, port, _WARM_REQUESTS, 48, 1)
        resident = [resident_bytes(fronts)]
        for _ in range(10):
            await asyncio.to_thread(churn, port, num_cancels // 10, 48, 1)
            resident.append(resident_bytes(fronts))
        leaked = await _used_blocks(serving.operations)
    p99 = float(np.percentile(steps, 99))
    # Some allocations happen only once, so only the second half shows continuous growth.
    growth = (resident[-1] - resident[5]) / (num_cancels / 2)
    results = {
        "steps_to_free_p99": p99,
        "steps_to_free_max": float(steps.max()),
        "free_ms_p99": float(np.percentile(free_ms, 99)),
        "num_cancels": num_cancels,
        "num_leaked_blocks": leaked,
        "growth_bytes_each": growth,
        "grown_mib": (resident[-1] - resident[0]) / 2**20,
    }
    print_table("Cancels", tuple(results), [tuple(results.values())])
    return [results], [
        at_most("cancel to pages free, p99", p99, 2, "steps"),
        at_most(
            "from the client's cancel, in time, p99",
            float(np.percentile(free_ms, 99)),
            50.0 + STEP_S * 1e3,
            "ms",
        ),
        at_most(f"blocks leaked by {num_cancels:,} cancels", leaked, 0, "blocks"),
        at_most(
            "memory that a cancel leaves behind in the front",
            growth,
            _MAX_GROWTH_BYTES,
            "B",
            is_settled=num_cancels >= 100_000,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """The results of many malformed requests. `statuses`: the number of each status."""

    num_sent: int
    statuses: dict[str, int]
    num_restarts: int
    num_leaked_blocks: int
    num_probes_wrong: int


def malformed_bodies(seed: int) -> Iterator[bytes]:
    """Yield an endless sequence of bodies: noise, and valid requests that are truncated, have
    flipped bits, are spliced or have invalid values.
    """
    chance = random.Random(seed)
    whole = request(3, 4).SerializeToString()
    while True:
        kind = chance.randrange(5)
        data = bytearray(whole)
        if kind == 0:
            yield chance.randbytes(chance.randrange(0, 200))
        elif kind == 1:
            yield bytes(data[: chance.randrange(len(data))])
        elif kind == 2:
            for _ in range(chance.randrange(1, 8)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            yield bytes(data)
        elif kind == 3:
            at = chance.randrange(len(data))
            data[at:at] = chance.randbytes(chance.randrange(1, 12))
            yield bytes(data)
        else:
            yield _nonsense(chance)


def _nonsense(chance: random.Random) -> bytes:
    """Return a well-formed request with invalid or extreme numbers."""
    message = request(3, 4)
    odd = [float("nan"), float("inf"), -1.0, 1e308]
    message.sampling.temperature = chance.choice(odd)
    message.sampling.top_p = chance.choice([*odd, 0.5])
    message.stopping.max_tokens = chance.choice([0, 2**32 - 1, 4])
    if chance.random() < 0.5:
        message.token_prompt.ids.extend([chance.choice([2**31 - 1, 600_000])])
    return message.SerializeToString()


async def _send_malformed(serving: Service, num_requests: int) -> Counter[str]:
    statuses: Counter[str] = Counter()
    bodies = malformed_bodies(1)

    async def caller(channel: grpc.aio.Channel, count: int) -> None:
        generate: Any = channel.unary_stream(GENERATE)
        for _ in range(count):
            try:
                async for _message in generate(next(bodies), timeout=20.0):
                    pass
                statuses["OK"] += 1
            except grpc.aio.AioRpcError as error:
                statuses[error.code().name] += 1

    async with connections(serving.address) as channels:
        share = num_requests // _NUM_CALLERS
        await asyncio.gather(
            *(caller(channels[i % len(channels)], share) for i in range(_NUM_CALLERS))
        )
    return statuses


async def malformed(num_requests: int) -> tuple[list[Any], list[Check]]:
    """Send many malformed requests; check whether another client is affected."""
    progress("malformed")
    with service(*simulated(0.002), has_operations=True) as serving:
        before = {role: list(found) for role, found in serving.up.items()}
        async with connections(serving.address) as channels:
            probe = ConcurrentStreams(channels[:1], range(8), 900)
            statuses = await _send_malformed(serving, num_requests)
            probe.cancel()
            again = ConcurrentStreams(channels[:1], range(8), 50)
            await again.until_ended()
        leaked = await _used_blocks(serving.operations)
        found = Malformed(
            num_sent=sum(statuses.values()),
            statuses=dict(statuses),
            num_restarts=_num_restarts(before, serving.up),
            num_leaked_blocks=leaked,
            num_probes_wrong=sum(
                one.status not in ("", "OK") for one in (*probe.received, *again.received)
            ),
        )
    print_table("Malformed requests", ("status", "number"), sorted(statuses.items()))
    num_odd = sum(number for status, number in statuses.items() if status not in _ALLOWED)
    checks = [
        ("crashes", found.num_restarts, "processes"),
        ("answered UNKNOWN", statuses["UNKNOWN"], "requests"),
        ("answered as no such request may be", num_odd, "requests"),
        ("blocks leaked", leaked, "blocks"),
        ("streams of others that noticed", found.num_probes_wrong, "streams"),
    ]
    return [asdict(found)], [
        at_most(f"{found.num_sent:,} malformed requests: {name}", value, 0, unit)
        for name, value, unit in checks
    ]


def _num_restarts(before: dict[str, list[Ready]], after: dict[str, list[Ready]]) -> int:
    return sum(len(found) - len(before[role]) for role, found in after.items())
