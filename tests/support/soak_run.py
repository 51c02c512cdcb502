"""One soak from start to report: a real service, its clients, its faults.

Owns the order of things. What each part does stands in the other soak modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from support.observation import observed
from support.service import simulated
from support.soak_call import Lines
from support.soak_ledger import Ledger
from support.soak_load import DEADLY, POISON, Load, loaded
from support.soak_plan import SoakPlan
from support.soak_reference import (
    NUM_CANARIES,
    Reference,
    SimulatedReference,
    measured,
)
from support.soak_report import SoakResult, judge
from support.soak_strikes import Striker
from support.soak_watch import Watch, is_quiet

NUM_LINES = 8
_STEP_S = 0.02
_FAULTS = [
    {"kind": "request_fails", "at_prompt_token": POISON, "max_times": 10**9},
    {"kind": "process_exits", "at_prompt_token": DEADLY, "at_output": 3, "exit_code": 9},
]


def arguments(plan: SoakPlan, folder: Path) -> list[str]:
    """Of the service: room for the steady load, none for a whole burst."""
    cost = {"step_s": _STEP_S, "prefill_token_s": 0.0, "decode_slot_s": 0.0}
    model = (
        ["--executor", "torch", "--dtype", "float32", "--threads", "1"]
        if plan.is_torch
        else simulated(cost=cost, faults=_FAULTS)
    )
    return [
        *model,
        *("--fronts", "2", "--flight-folder", str(folder)),
        *("--max-num-seqs", str(plan.max_concurrent)),
        *("--max-num-waiting", str(max(16, plan.burst_size // 2))),
        *("--max-reader-stall-s", "5", "--drain-grace-s", "10", "--engine-hang-s", "3"),
    ]


async def run_soak(plan: SoakPlan, tell: Callable[[str], None]) -> SoakResult:
    """Play a plan. `tell` gets a line now and then."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            service, operations = await stack.enter_async_context(
                observed(*arguments(plan, Path(folder)))
            )
            reference = await _reference(plan, service.address)
            watch = Watch(service, operations)
            lines = Lines(service.address, NUM_LINES)
            begun_s = ledger.begun_s = time.monotonic()
            load = await stack.enter_async_context(loaded(Load(plan, lines, reference, ledger)))
            striker = Striker(plan, service, load, watch, tell)
            async with _looking(watch, ledger, plan, tell):
                async with asyncio.TaskGroup() as group:
                    group.create_task(load.run())
                    group.create_task(striker.run())
                await load.end_holders()
                has_settled = await watch.until(is_quiet, plan.settle_s)
                last = [await load.canary() for _ in range(NUM_CANARIES)]
                has_settled &= await watch.until(is_quiet, plan.settle_s)
            seconds = time.monotonic() - begun_s
            service.signal(signal.SIGTERM)
            exit_code = await service.ended()
            watch.read_log()
    result = SoakResult(
        plan=plan,
        seconds=seconds,
        ledger=ledger,
        watch=watch,
        struck=sorted(striker.struck, key=lambda struck: struck.at_s),
        last_canaries=sum(not outcome.cause for outcome in last),
        num_last_canaries=NUM_CANARIES,
        is_quiet=has_settled,
        exit_code=exit_code,
        log=service.stderr[-200:],
    )
    judge(result)
    return result


async def _reference(plan: SoakPlan, address: str) -> Reference:
    if not plan.is_torch:
        return SimulatedReference()
    lines = Lines(address, 1)
    try:
        return await measured(lines.first, plan.max_tokens, plan.seed)
    finally:
        await lines.close()


@contextlib.asynccontextmanager
async def _looking(
    watch: Watch, ledger: Ledger, plan: SoakPlan, tell: Callable[[str], None]
) -> AsyncGenerator[None]:
    """The watch runs inside the block, and a line is reported every ten seconds."""

    async def talk() -> None:
        while True:
            await asyncio.sleep(10.0)
            tell(
                f"{time.monotonic() - ledger.begun_s:6.1f} s of {plan.seconds:.0f}:"
                f" {ledger.num_requests} requests, {ledger.num_errors} errors,"
                f" {len(ledger.wrong)} wrong, {len(watch.faults)} faults"
            )

    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(talk())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
    if failures:
        raise failures[0]
