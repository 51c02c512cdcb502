"""Compares how several servers deliver tokens, by CPU time per token, throughput and delay.

The servers are Penstock (`Generate` with one and with two fronts (gRPC server processes),
`Multiplex`) on its simulated executor, bare grpc.aio, FastAPI with server-sent events, plain TCP
lines and a C++ gRPC server. Steps follow at a fixed interval; in each step every stream gets one
token. All servers are measured with the same load client, `native/load_client.cpp` (C++, without
gRPC's core library). The servers alternate. Reports medians over the rounds. A round in which other
processes used more than 0.3 cores is excluded, unless that holds for every round.

    python benchmarks/delivery.py [--full] [--json FILE]

CPU time: of all threads of the server's processes during a measured window, as reported by the
kernel. For Penstock these are the front processes; the engine process is reported separately.

Delay: from the time at which a token is due until the client has read it. The tokens of the other
servers come from a separate program. It keeps an absolute schedule, so a slow server does not slow
it down. Penstock's simulated executor keeps its schedule too, unless the engine process is delayed
by more than a step: then all later tokens are late.

To measure this lateness, the executor pauses twice, as scripted: before and after the window. After
the first pause all streams continue with the same step, so the client knows the step of each token.
The schedule is inferred from the fastest token. The first token after the second pause shows how
late the executor is by then. This lateness is subtracted from `delay_p50_ms` and `delay_p99_ms`,
but not from `strict_p99_ms`. The subtracted amount never exceeds the minimum delay of later tokens.
The delay of the fastest token counts as zero, so Penstock's delays are about 0.3 ms too low.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    CellResult,
    Load,
)
from delivery_engine import EngineCost, measure_engine
from report import (
    Check,
    Outcome,
    RunFailed,
    arguments,
    at_least,
    at_most,
    medians,
    over,
    print_rows,
    progress,
    run,
)

NUM_ATTEMPTS = 3
MAX_FOREIGN_CORES = 0.3
MIN_RUNS = 3
"""Minimum number of runs of a server, or of common rounds of a ratio, for a result."""
BASE: Load = (256, 20.0)
BUSY: Load = (256, 5.0)
OVERLOAD: Load = (256, 2.5)
MANY: Load = (1000, 20.0)
"""The loads, in this order: for ratios between servers; so fast that one message per token is too
much; twice that; with many streams.
"""
_QUICK: dict[Load, tuple[str, ...]] = {
    BASE: (GENERATE, MULTIPLEX, AIO, EVENTS, LINES, CORE),
    BUSY: (GENERATE, TWO_FRONTS, MULTIPLEX, AIO),
    OVERLOAD: (GENERATE,),
    MANY: (GENERATE, MULTIPLEX),
}
_FULL: dict[Load, tuple[str, ...]] = {
    **{(num, step_ms): SIDES for num in (1, 64, 256, 1000) for step_ms in (20.0, 5.0)},
    OVERLOAD: SIDES,
}
Goal: TypeAlias = tuple[str, Load, str, str, str, Callable[..., Check], float, str]
"""Name, load, figure, side, the side of the same rounds that it is divided by ("": none), kind of
check, goal, unit.
"""
_GOALS: tuple[Goal, ...] = (
    ("CPU per message over grpc.aio", BASE, "message_us", GENERATE, AIO, at_most, 1.25, "x"),
    *(
        goal
        for load, share, p99_ms in ((BASE, 0.99, 20.0), (BUSY, 0.99, 40.0), (OVERLOAD, 0.95, 100.0))
        for goal in (
            ("delivered", load, "delivered", GENERATE, "", at_least, share, "share"),
            ("p99 delay", load, "delay_p99_ms", GENERATE, "", at_most, p99_ms, "ms"),
        )
    ),
    ("CPU per message over one", BUSY, "message_us", TWO_FRONTS, GENERATE, at_most, 1.2, "x"),
    ("CPU per token", BASE, "server_us", MULTIPLEX, "", at_most, 4.0, "us"),
    ("CPU per token", BUSY, "server_us", MULTIPLEX, "", at_most, 4.0, "us"),
    ("tokens per core over grpc.aio", BASE, "per_core", MULTIPLEX, AIO, at_least, 6.0, "x"),
    ("CPU per token over C++ gRPC", BASE, "server_us", MULTIPLEX, CORE, at_most, 2.0, "x"),
    ("delivered", MANY, "delivered", GENERATE, "", at_least, 0.99, "share"),
    ("delivered", MANY, "delivered", MULTIPLEX, "", at_least, 0.99, "share"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run measures.

    `grid`: the servers to run for each load. `warm_s`, `window_s`: durations of the warm-up and of
    the measurement of a server, in seconds. `num_engine_steps`: number of steps in the measurement
    of the engine process.
    """

    grid: Mapping[Load, tuple[str, ...]]
    warm_s: float
    window_s: float
    num_engine_steps: int


_PLANS = {
    False: Plan(grid=_QUICK, warm_s=0.3, window_s=2.0, num_engine_steps=80),
    True: Plan(grid=_FULL, warm_s=0.7, window_s=2.5, num_engine_steps=200),
}


def unavailable_servers() -> dict[str, str]:
    """Return the servers that cannot be measured on this machine, with the reason."""
    missing: dict[str, str] = {}
    packages = ("fastapi", "uvicorn", "httptools")
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        missing[EVENTS] = f"not installed: {', '.join(absent)}"
    try:
        native_build.grpc_server()
    except native_build.CannotBuild as error:
        missing[CORE] = str(error)
    for side, why in missing.items():
        progress(f"left out: {side}: {why}")
    return missing


def _measured(cell: Cell) -> CellResult | None:
    where = f"{cell.num_streams:>4} x {cell.step_ms:g} ms  {cell.side:<18}"
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


def undisturbed(*sides: Sequence[CellResult]) -> list[list[CellResult]]:
    """Return, for each side, its runs in the rounds in which all sides were measured. Rounds
    disturbed by other processes are left out, unless every round was disturbed.
    """
    common = set.intersection(*({one.round_index for one in side} for side in sides))
    noisy = {
        one.round_index for side in sides for one in side if one.foreign_cores > MAX_FOREIGN_CORES
    }
    rounds = common - noisy or common
    return [[one for one in side if one.round_index in rounds] for side in sides]


def checks_of(runs: Sequence[CellResult], engine: EngineCost) -> list[Check]:
    """Return the checks; figures that were not measured are left out."""
    by_side = _by_side(runs)
    checks: list[Check] = []
    for name, load, figure, side, base, judge, goal, unit in _GOALS:
        wanted = [(load, each) for each in (side, base) if each]
        if not all(each in by_side for each in wanted):
            continue
        mine, *others = undisturbed(*(by_side[each] for each in wanted))
        value = over(mine, others[0], figure) if base else getattr(medians(mine, "side")[0], figure)
        title = f"{side}, {load[0]} x {load[1]:g} ms: {name}"
        checks.append(judge(title, value, goal, unit, is_settled=len(mine) >= MIN_RUNS))
    name = f"engine process, {engine.num_streams} streams: link and events per token"
    return [*checks, at_most(name, engine.delivery_us, 1.0, "us")]


def measure(options: Namespace) -> Outcome:
    """Run all rounds, with the servers of a load alternating, then the engine process."""
    native_build.load_client()
    plan, missing = _PLANS[options.full], unavailable_servers()
    cells = [
        Cell(
            side=side,
            num_streams=load[0],
            step_ms=load[1],
            warm_s=plan.warm_s,
            window_s=plan.window_s,
            round_index=number,
        )
        for load, sides in plan.grid.items()
        for number in range(MIN_RUNS)
        for side in sides
        if side not in missing
    ]
    runs = [seen for cell in cells if (seen := _measured(cell)) is not None]
    # At the step time used for the ratios, at which each step finds cold CPU caches.
    engine = measure_engine(*BASE, plan.num_engine_steps)
    steps = [
        measure_engine(num_streams, BASE[1], plan.num_engine_steps, num_fronts=num_fronts)
        for num_fronts in (1, 8)
        for num_streams in (1, 256, 1000)
    ]
    kept = [one for side in _by_side(runs).values() for one in undisturbed(side)[0]]
    print_rows(
        "Delivery (medians)",
        medians(kept, "num_streams", "step_ms", "side"),
        *("num_streams", "step_ms", "side", "server_us", "message_us", "tokens_per_s", "delivered"),
        *("per_core", "server_cores", "delay_p50_ms", "delay_p99_ms", "strict_p99_ms", "engine_us"),
    )
    print_rows(
        "Engine process, us of CPU per token; of a step",
        [engine, *steps],
        *("num_streams", "num_fronts", "link_us", "events_us", "schedule_us", "delivery_us"),
        "step_us",
    )
    results = {"runs": runs, "engine": engine, "engine_steps": steps, "left_out": missing}
    return results, checks_of(runs, engine)


def _by_side(runs: Sequence[CellResult]) -> dict[tuple[Load, str], list[CellResult]]:
    groups: dict[tuple[Load, str], list[CellResult]] = {}
    for one in runs:
        groups.setdefault((one.load, one.side), []).append(one)
    return groups


if __name__ == "__main__":
    run(arguments(__doc__), measure)
