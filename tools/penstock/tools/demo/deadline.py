"""`penstock demo --deadline`: twice the load that can be served, every answer due in three seconds.

Owns the scene: the same requests with deadline prediction (the default), and first come, first
served without it.
"""

import asyncio
from collections import Counter

from penstock.client import Client, PenstockError
from penstock.server.cli.command import ExitCode
from penstock.server.cli.models import table_lines
from penstock.tools.own_service import OwnService

_NUM_SLOTS = 16
SERVE_ARGS = ("--max-num-seqs", str(_NUM_SLOTS))
_DEADLINE_S = 3.0
_NUM_TOKENS = 200
_SECONDS = 8.0
_LOAD = 2.0
_NUM_WAVES = 3
_AT_ONCE_S = 0.5
"""Time limit within which a rejection counts as immediate."""
_MOST_IN_TIME = 0.8
"""At twice the capacity, at most 11/16 of the requests can be in time: 8 s of arrivals plus 3 s."""


async def deadline_scene(predicting: OwnService, fcfs: OwnService) -> int:
    """Run the scene on two running services; return the exit code."""
    async with Client(predicting.address) as client:
        rate = await measured_capacity(client)
    print(
        f"this machine serves about {rate:.1f} such answers/s; now {_LOAD * rate:.1f}/s come,"
        f" each due within {_DEADLINE_S:g} s",
        flush=True,
    )
    rows: list[tuple[str, ...]] = []
    most_in_time = 0.0
    for name, service in (
        ("predicted deadlines (the default)", predicting),
        ("first come, first served", fcfs),
    ):
        print(f"{name} ...", flush=True)
        async with Client(service.address) as client:
            outcomes = await _offer(client, _LOAD * rate)
        most_in_time = max(most_in_time, outcomes["in time"] / outcomes.total())
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
    if not was_overload(most_in_time):
        print(
            f"no overload: {most_in_time:.0%} of the requests were in time, so the load was not"
            f" {_LOAD:g} times the capacity; run it again when no other program is busy",
            flush=True,
        )
        return ExitCode.FAILED
    return ExitCode.OK


def was_overload(most_in_time: float) -> bool:
    """Return whether the load exceeded the capacity. `most_in_time`: the greater share of answers
    in time of the two services.
    """
    return most_in_time <= _MOST_IN_TIME


async def measured_capacity(client: Client) -> float:
    """Measure answers per second with all slots busy: the best of several full waves after one
    warm-up.

    The best is used because other programs can only lower the rate.
    """
    now = asyncio.get_running_loop().time
    waves_s: list[float] = []
    for _ in range(1 + _NUM_WAVES):
        started_s = now()
        await asyncio.gather(*(_answer(client, seed, None) for seed in range(_NUM_SLOTS)))
        waves_s.append(now() - started_s)
    return _NUM_SLOTS / min(waves_s[1:])


async def _offer(client: Client, rate: float) -> Counter[str]:
    """Send requests at a constant rate for `_SECONDS`, independent of their outcome."""
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
