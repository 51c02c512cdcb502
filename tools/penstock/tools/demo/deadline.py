"""`penstock demo --deadline`: twice the load that can be served, every answer due in three seconds.

Owns the scene: the same requests with predicted deadlines (the default), and first come, first
served without.
"""

import asyncio
from collections import Counter

from penstock.client import Client, PenstockError
from penstock.server.cli.command import ExitCode
from penstock.server.cli.models import table_lines
from penstock.tools.own_service import OwnService

SERVE_ARGS = ("--max-num-seqs", "16")
_DEADLINE_S = 3.0
_NUM_TOKENS = 200
_SECONDS = 8.0
_LOAD = 2.0
_NUM_PROBES = 24
_AT_ONCE_S = 0.5
"""Time limit within which a rejection counts as immediate."""


async def deadline_scene(predicting: OwnService, fcfs: OwnService) -> int:
    """Run the scene on two running services; the exit code."""
    async with Client(predicting.address) as client:
        rate = await _capacity(client)
    print(
        f"this machine serves about {rate:.1f} such answers/s; now {_LOAD * rate:.1f}/s come,"
        f" each due within {_DEADLINE_S:g} s",
        flush=True,
    )
    rows: list[tuple[str, ...]] = []
    for name, service in (
        ("predicted deadlines (the default)", predicting),
        ("first come, first served", fcfs),
    ):
        print(f"{name} ...", flush=True)
        async with Client(service.address) as client:
            outcomes = await _offer(client, _LOAD * rate)
        rows.append(
            (
                name,
                str(outcomes["in time"]),
                str(outcomes["rejected at once"]),
                str(outcomes["too late"]),
            )
        )
    header = ("ORDER", "IN TIME", "REJECTED AT ONCE", "TOO LATE")
    print("\n".join(["", *table_lines([header, *rows]), ""]), flush=True)
    return ExitCode.OK


async def _capacity(client: Client) -> float:
    """Answers per second at the service's full concurrency; a first round warms up."""
    now = asyncio.get_running_loop().time
    taken_s = 0.0
    for _ in range(2):
        started_s = now()
        await asyncio.gather(*(_answer(client, seed, None) for seed in range(_NUM_PROBES)))
        taken_s = now() - started_s
    return _NUM_PROBES / taken_s


async def _offer(client: Client, rate: float) -> Counter[str]:
    """Send requests at a constant rate for some seconds, independent of their outcome."""
    tasks: list[asyncio.Task[str]] = []
    for seed in range(round(rate * _SECONDS)):
        tasks.append(asyncio.create_task(_outcome(client, seed)))
        await asyncio.sleep(1.0 / rate)
    return Counter(await asyncio.gather(*tasks))


async def _outcome(client: Client, seed: int) -> str:
    now = asyncio.get_running_loop().time
    started_s = now()
    try:
        await _answer(client, seed, _DEADLINE_S)
    except PenstockError:
        return "rejected at once" if now() - started_s < _AT_ONCE_S else "too late"
    return "in time" if now() - started_s <= _DEADLINE_S else "too late"


async def _answer(client: Client, seed: int, deadline_s: float | None) -> None:
    async for _ in client.generate(
        "ROMEO:\n", max_tokens=_NUM_TOKENS, seed=seed, deadline_s=deadline_s
    ):
        pass
