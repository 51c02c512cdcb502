"""`penstock demo --flood`: one tenant floods the service; a quiet tenant is not affected.

Owns the scene: a quiet tenant alone, during the flood in fair order, and during the flood first
come, first served.
"""

import asyncio
import contextlib
import statistics
from dataclasses import dataclass

from penstock.client import Client, PenstockError, Tokens
from penstock.server.cli.command import ExitCode
from penstock.server.cli.models import table_lines
from penstock.tools.own_service import OwnService

TENANT_KEY = "x-tenant"
SERVE_ARGS = ("--tenant-metadata-key", TENANT_KEY, "--max-num-seqs", "16")
_NUM_FLOODING = 100
_FLOOD_TOKENS = 300
_QUIET_TOKENS = 16
_WATCHED_S = 6.0
"""Duration in seconds of each measurement of the quiet tenant."""
_PAUSE_S = 0.25
"""Seconds between two requests of the quiet tenant."""
_FLOOD_AHEAD_S = 1.0


async def flood_scene(fair: OwnService, fcfs: OwnService) -> int:
    """Run the scene on two running services; return the exit code."""
    async with Client(fair.address) as client:
        print("the quiet tenant alone ...", flush=True)
        alone = await _quiet(client)
    rows = [_row("alone", alone)]
    for name, service in (("fair (the default)", fair), ("first come, first served", fcfs)):
        print(f"next to {_NUM_FLOODING} requests of another tenant, {name} ...", flush=True)
        async with Client(service.address) as client:
            flood = [asyncio.create_task(_flood(client, seed)) for seed in range(_NUM_FLOODING)]
            try:
                await asyncio.sleep(_FLOOD_AHEAD_S)
                rows.append(_row(name, await _quiet(client)))
            finally:
                for task in flood:
                    task.cancel()
                await asyncio.gather(*flood, return_exceptions=True)
    header = ("ORDER", "QUIET TENANT'S TTFT p50", "LONGEST", "ANSWERS STARTED")
    print("\n".join(["", *table_lines([header, *rows]), ""]), flush=True)
    return ExitCode.OK


@dataclass(slots=True)
class _Waits:
    """Seconds to the first token; for an unfinished last request, the seconds measured so far."""

    started_answers_s: list[float]
    unfinished_s: float | None = None


async def _quiet(client: Client) -> _Waits:
    """Send short requests one after another for the measured time."""
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
    """Send requests of the flood one after another, also after a rejection, until cancelled."""
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
