"""Compares the delivery of tokens by several servers: CPU time per token, throughput and delay.

Penstock (`Generate` with one and with two front-end processes, `Multiplex`) on its simulated
executor, bare grpc.aio, FastAPI with server-sent events, plain TCP lines and a C++ gRPC server,
each with tokens at fixed steps, the same messages and the same load client (C++, without gRPC's
core library). The servers alternate. Reports medians over the rounds; rounds in which other
processes used more than 0.3 cores are excluded, unless all did.

    python benchmarks/delivery.py [--full] [--json FILE] [--report DIR]

Measurements. CPU time: of all threads of the servers (front processes; the engine process
separately), as reported by the kernel at both ends of a window. Delay: from the time at which a
token is due until the client has read it. The program that generates the tokens of the other
servers keeps an absolute schedule, so a slow server does not slow it down. The simulated executor
also does, unless its engine process is delayed by more than a step; then its schedule is late from
then on. This lateness is measured with two scripted pauses around the window, and subtracted (p99)
or not (p99 strict); the subtracted amount never exceeds the minimum delay of later tokens. A
service's schedule is fitted to its fastest token, so its delays begin at zero, which is about 0.3
ms too low.

R1, R2, R3: CPU time per token divided by that of TCP lines, of C++ gRPC, and of bare grpc.aio.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import delivery_cells
import native_build
from delivery_cells import (
    AIO,
    CORE,
    EVENTS,
    GENERATE,
    LINES,
    MULTIPLEX,
    SIDES,
    TWO_FRONTS,
    Cell,
    Load,
    Seen,
)
from delivery_engine import measure_engine
from delivery_results import (
    BASE,
    BUSY,
    HEADER,
    MANY,
    MAX_FOREIGN_CORES,
    MIN_RUNS,
    OVERLOAD,
    Results,
    charts_of,
    checks_of,
    most_delivered,
    rows_of,
)
from report import arguments, print_checks, print_table, progress, write_json
from report_page import Table, write_page
from services import RunFailed

NUM_ATTEMPTS = 3
_QUICK: dict[Load, tuple[str, ...]] = {
    BASE: (GENERATE, MULTIPLEX, AIO, EVENTS, LINES, CORE),
    BUSY: (GENERATE, TWO_FRONTS, MULTIPLEX, AIO),
    OVERLOAD: (GENERATE,),
    MANY: (GENERATE, MULTIPLEX),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The servers to run for each load, and the number of rounds."""

    grid: Mapping[Load, tuple[str, ...]]
    num_rounds: dict[Load, int]
    warm_s: float
    window_s: float


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan. The quick run takes about four minutes, because a check needs three rounds;
    the full run measures the whole grid.
    """
    if not options.full:
        rounds = dict.fromkeys(_QUICK, MIN_RUNS)
        return Plan(grid=_QUICK, num_rounds=rounds, warm_s=0.3, window_s=2.0)
    grid: dict[Load, tuple[str, ...]] = {
        (num_streams, step_ms): SIDES
        for num_streams in (1, 64, 256, 1000)
        for step_ms in (20.0, 5.0)
    }
    grid[OVERLOAD] = SIDES
    return Plan(grid=grid, num_rounds=dict.fromkeys(grid, 3), warm_s=0.7, window_s=2.5)


def left_out() -> dict[str, str]:
    """Return the servers that cannot be measured on this machine, with the reason."""
    missing: dict[str, str] = {}
    absent = [name for name in ("fastapi", "uvicorn", "httptools") if not _is_installed(name)]
    if absent:
        missing[EVENTS] = f"not installed: {', '.join(absent)}"
    try:
        native_build.grpc_server()
    except native_build.CannotBuild as error:
        missing[CORE] = str(error)
    return missing


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run(plan: Plan, missing: dict[str, str]) -> list[Seen]:
    """Run all rounds, with the servers of a load alternating."""
    found: list[Seen] = []
    for load, sides in plan.grid.items():
        for number in range(plan.num_rounds[load]):
            for side in sides:
                if side in missing:
                    continue
                cell = Cell(
                    side=side,
                    num_streams=load[0],
                    step_ms=load[1],
                    warm_s=plan.warm_s,
                    window_s=plan.window_s,
                    round_index=number,
                )
                seen = _measured(cell, number)
                if seen is not None:
                    found.append(seen)
    return found


def _measured(cell: Cell, number: int) -> Seen | None:
    where = f"{cell.num_streams:>4} x {cell.step_ms:g} ms  round {number + 1}  {cell.side:<18}"
    for attempt in range(NUM_ATTEMPTS):
        try:
            seen = delivery_cells.measure(cell)
        except RunFailed as error:
            progress(f"{where}  failed: {error}")
            continue
        # A server that gets no CPU time looks like an idle one.
        is_misread = seen.slip_ms >= 0 and not seen.is_aligned
        if is_misread or (seen.slip_ms < 0 and attempt + 1 < NUM_ATTEMPTS):
            progress(f"{where}  again: the pauses were not seen")
            continue
        progress(
            f"{where}  {seen.server_us:6.2f} us/token  p99 {seen.delay_p99_ms:6.1f} ms"
            f"  {seen.tokens_per_s:>7,.0f} tokens/s  others {seen.foreign_cores:.1f} cores"
        )
        return seen
    return None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a page with charts")
    options = parser.parse_args()
    try:
        native_build.load_client()
    except native_build.CannotBuild as error:
        raise SystemExit(f"delivery.py: {error}") from None
    missing, plan = left_out(), plan_of(options)
    seen = run(plan, missing)
    # At the step time used for the ratios, at which each step finds cold CPU caches.
    num_steps = 200 if options.full else 80
    engine = measure_engine(*BASE, num_steps)
    steps = [
        measure_engine(num_streams, BASE[1], num_steps, num_fronts=num_fronts)
        for num_fronts in (1, 8)
        for num_streams in (1, 256, 1000)
    ]
    results = Results(seen)
    rows, most = rows_of(results, plan.grid), most_delivered(results, plan.grid)
    checks = checks_of(results, engine)
    print_table("Delivery (medians)", HEADER, rows)
    print_table("Most delivered", ("side", "tokens/s", "server cores", "at"), most)
    print_table(
        "Engine process, us of CPU per token at 256 streams",
        ("link", "events", "scheduling"),
        [(engine.link_us, engine.events_us, engine.schedule_us)],
    )
    print_table(
        "Engine process, us of CPU per step",
        (
            "streams",
            "fronts",
            "link",
            "events",
            "scheduling",
            "whole step",
            "link and events/token",
        ),
        [cost.row for cost in steps],
    )
    print_checks(checks)
    for side, why in missing.items():
        print(f"\nleft out: {side}: {why}")
    num_noisy = sum(each.foreign_cores > MAX_FOREIGN_CORES for each in seen)
    print(f"\n{num_noisy} of {len(seen)} runs beside others on {os.cpu_count()} cores")
    if options.report is not None:
        table = Table(title="Medians", header=HEADER, rows=rows)
        path = options.report / "delivery.html"
        write_page(path, "Delivery side by side", [table], charts_of(seen), checks)
    document = {
        "runs": [asdict(each) for each in seen],
        "engine": asdict(engine),
        "engine_steps": [asdict(cost) for cost in steps],
        "left_out": missing,
    }
    write_json(options.json, document, checks)


if __name__ == "__main__":
    main()
