"""`penstock demo --flood`: one tenant floods the service, while a low-rate tenant sends short
requests.

Shows the low-rate tenant's times to the first token, first without other requests, then during a
flood. The flood is sent to two services at the same time: one schedules tenants fairly (the
default), the other first come, first served.
"""

import asyncio
import contextlib
import statistics
from dataclasses import dataclass

from penstock.client import Client, PenstockError, Tokens
from penstock.server.cli.command import ExitCode
from penstock.server.cli.report import table_lines
from penstock.tools.own_service import OwnService

TENANT_KEY = "x-tenant"
SERVE_ARGS = ("--tenant-metadata-key", TENANT_KEY, "--max-num-seqs", "16")
_NUM_FLOODING = 100
_FLOOD_TOKENS = 300
_QUIET_TOKENS = 16
_WATCHED_S = 4.0
"""Duration of each measurement of the low-rate tenant, seconds."""
_PAUSE_S = 0.25
"""Pause between two requests of the low-rate tenant, seconds."""
_FLOOD_AHEAD_S = 1.0


async def flood_scene(fair: OwnService, fcfs: OwnService) -> int:
    """Measure on both running services and print the times; return the exit code. `fcfs` serves
    requests first come, first served.
    """
    await asyncio.gather(_warm_up(fair), _warm_up(fcfs))
    async with Client(fair.address) as client:
        print("the quiet tenant alone ...", flush=True)
        alone = await _quiet(client)
    print(f"next to {_NUM_FLOODING} requests of another tenant, in two orders ...", flush=True)
    in_fair, in_fcfs = await asyncio.gather(_next_to_a_flood(fair), _next_to_a_flood(fcfs))
    rows = [
        _row("alone", alone),
        _row("fair (the default)", in_fair),
        _row("first come, first served", in_fcfs),
    ]
    header = ("ORDER", "QUIET TENANT'S TTFT p50", "LONGEST", "ANSWERS STARTED")
    print("\n".join(["", *table_lines([header, *rows]), ""]), flush=True)
    if not all(waits.started_answers_s for waits in (alone, in_fair, in_fcfs)):
        print(f"-: no answer started within {_WATCHED_S:g} s.")
    print(
        f"Next to the same flood, {len(in_fair.started_answers_s)} answers of the quiet tenant"
        f" started in fair order,\nand {len(in_fcfs.started_answers_s)} first come, first served:"
        " the fair order gives each tenant its share.",
        flush=True,
    )
    return ExitCode.OK


@dataclass(slots=True)
class _Waits:
    """Times to the first token of requests, seconds. `unfinished_s`: how long the last request had
    waited when the measurement ended before its first token; None if it received one.
    """

    started_answers_s: list[float]
    unfinished_s: float | None = None


async def _warm_up(service: OwnService) -> None:
    """Generate once without measuring, because the first request of a service takes longer than
    later ones.
    """
    async with Client(service.address) as client:
        await client.generate_once("ROMEO:\n", max_tokens=_QUIET_TOKENS)


async def _next_to_a_flood(service: OwnService) -> _Waits:
    """Flood the service as one tenant, and from 1 s later on send the low-rate tenant's requests;
    return the times to their first tokens.
    """
    async with Client(service.address) as client:
        flood = [asyncio.create_task(_flood(client, seed)) for seed in range(_NUM_FLOODING)]
        try:
            await asyncio.sleep(_FLOOD_AHEAD_S)
            return await _quiet(client)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)


async def _quiet(client: Client) -> _Waits:
    """Send short requests one after another for `_WATCHED_S`; return how long each waited for its
    first token.
    """
    waits = _Waits(started_answers_s=[])
    now = asyncio.get_running_loop().time
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WATCHED_S):
            while True:
                started_s = now()
                waits.unfinished_s = started_s
                async for event in client.generate(
                    "ROMEO:\n", max_tokens=_QUIET_TOKENS, metadata=((TENANT_KEY, "quiet"),)
                ):
                    if waits.unfinished_s is not None and isinstance(event, Tokens):
                        waits.started_answers_s.append(now() - started_s)
                        waits.unfinished_s = None
                await asyncio.sleep(_PAUSE_S)
    if waits.unfinished_s is not None:
        waits.unfinished_s = now() - waits.unfinished_s
    return waits


async def _flood(client: Client, seed: int) -> None:
    """Send requests one after another until cancelled; continue after errors such as rejections."""
    while True:
        try:
            async for _ in client.generate(
                "KING:\n",
                max_tokens=_FLOOD_TOKENS,
                seed=seed,
                metadata=((TENANT_KEY, "flood"),),
            ):
                pass
        except PenstockError:
            await asyncio.sleep(_PAUSE_S)


def _row(name: str, waits: _Waits) -> tuple[str, ...]:
    found = waits.started_answers_s
    longest = f"{max(found) * 1e3:.0f} ms" if found else "-"
    if waits.unfinished_s is not None and waits.unfinished_s > max(found, default=0.0):
        longest = f"over {waits.unfinished_s * 1e3:.0f} ms"
    usual = f"{statistics.median(found) * 1e3:.0f} ms" if found else "-"
    return (name, usual, longest, str(len(found)))
