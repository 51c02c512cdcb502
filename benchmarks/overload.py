"""What a service does that is offered more than it can carry: goodput, refusals, health.

A real service (fronts, engine, sockets) on the simulated executor, whose steps take 20 ms, is
offered from half to five times what it can carry, in an open loop: clients that do not wait for
each other. Told are, for each load, what was served in time, how long a refusal took to arrive, and
how long a health check took meanwhile. With `--picture` the curve is drawn.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from overload_load import Seen, drive
from penstock.tools.simulation.chart import Chart, Series, svg
from report import Check, arguments, print_checks, print_table, write_json
from simulated_service import service, simulated

STEP_S = 0.02
NUM_SLOTS = 16
NUM_TOKENS = 20
MAX_WAITING = 32
PEAK_PER_S = NUM_SLOTS / (NUM_TOKENS * STEP_S)
"""Requests that the executor can serve in a second when every slot is always taken."""
MAX_LAG_MS = 2.0
"""Where the client's own loop was later than that, a time that misses its goal says nothing: the
machine was busy. One that meets it holds all the more."""
MAX_TTFT_S = 2.0
"""Whoever waits longer for the first token was not served in time."""
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
WARM_UP_S = 1.0
_HEADER = (
    *("load", "offered/s", "served/s", "in time/s", "refused/s", "refusal p50 ms", "p99 ms"),
    *("health p99 ms", "max ms", "client's lag p99 ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load. Rates per second, over the time after the warm-up; milliseconds."""

    load: float
    offered_per_s: float
    served_per_s: float
    goodput_per_s: float
    refused_per_s: float
    refusal_p50_ms: float
    refusal_p99_ms: float
    health_p99_ms: float
    health_max_ms: float
    client_lag_p99_ms: float
    num_untold: int
    num_not_serving: int
    num_other_ends: int


def level_of(load: float, seen: Seen, duration_s: float) -> Level:
    """The figures of one load."""
    span_s = duration_s - WARM_UP_S
    ended = [(end_s, ttft_s) for end_s, ttft_s in seen.served if WARM_UP_S <= end_s < duration_s]
    num_offered = len(seen.served) + len(seen.refused_s) + sum(seen.others.values())
    refused_ms = 1e3 * np.array(seen.refused_s or [0.0])
    probe_ms = 1e3 * np.array(seen.probe_s or [0.0])
    return Level(
        load=load,
        offered_per_s=num_offered / duration_s,
        served_per_s=len(ended) / span_s,
        goodput_per_s=sum(ttft_s <= MAX_TTFT_S for _, ttft_s in ended) / span_s,
        refused_per_s=len(seen.refused_s) / duration_s,
        refusal_p50_ms=float(np.percentile(refused_ms, 50)),
        refusal_p99_ms=float(np.percentile(refused_ms, 99)),
        health_p99_ms=float(np.percentile(probe_ms, 99)),
        health_max_ms=float(probe_ms.max()),
        client_lag_p99_ms=1e3 * float(np.percentile(seen.lag_s or [0.0], 99)),
        num_untold=seen.num_untold,
        num_not_serving=seen.num_not_serving,
        num_other_ends=sum(seen.others.values()),
    )


def measure(duration_s: float, num_fronts: int) -> list[Level]:
    """One service, all loads one after the other."""
    num_blocks = NUM_SLOTS * 4
    options = (
        *("--simulated-config", simulated(STEP_S), "--max-num-seqs", str(NUM_SLOTS)),
        *("--max-num-waiting", str(MAX_WAITING), "--max-seq-len", "128", "--block-size", "64"),
        *("--num-blocks", str(num_blocks), "--pipeline-depth", "2"),
    )
    levels: list[Level] = []
    with service(*options, num_fronts=num_fronts) as (port, _, _):
        asyncio.run(drive(port, 0.5 * PEAK_PER_S, 1.0, NUM_TOKENS))  # everything is warm then
        for load in LOADS:
            seen = asyncio.run(drive(port, load * PEAK_PER_S, duration_s, NUM_TOKENS))
            levels.append(level_of(load, seen, duration_s))
    return levels


def checks_of(levels: list[Level]) -> list[Check]:
    """Goodput and refusals against their goals."""
    by_load = {level.load: level for level in levels}
    peak = max(level.goodput_per_s for level in levels)
    most = by_load[max(by_load)]
    overloaded = [level for level in levels if level.load > 1.0]
    is_quiet = max(level.client_lag_p99_ms for level in overloaded) <= MAX_LAG_MS
    health_ms = max(level.health_p99_ms for level in overloaded)
    counts = (
        ("health checks that were not SERVING", sum(level.num_not_serving for level in levels)),
        ("refusals without a time to come back", sum(level.num_untold for level in levels)),
        ("other ends than served and refused", sum(level.num_other_ends for level in levels)),
    )
    return [
        _check("goodput at 2x, of the peak", by_load[2.0].goodput_per_s / peak, 0.95, "share"),
        _check("goodput at 5x, of the peak", most.goodput_per_s / peak, 0.90, "share"),
        _check("peak, of what the executor can do", peak / PEAK_PER_S, 0.90, "share"),
        _check_time("p99 of a refusal at 5x", most.refusal_p99_ms, 5.0, is_quiet=is_quiet),
        _check_time("p99 of a health check", health_ms, 50.0, is_quiet=is_quiet),
        *(_check(name, count, 0.0, "of all") for name, count in counts),
    ]


def _check(name: str, value: float, goal: float, unit: str) -> Check:
    sense: Literal["at most", "at least"] = "at least" if unit == "share" else "at most"
    return Check(name=name, value=value, goal=goal, unit=unit, sense=sense)


def _check_time(name: str, value_ms: float, goal_ms: float, *, is_quiet: bool) -> Check:
    is_settled = is_quiet or value_ms <= goal_ms
    return Check(
        name=name, value=value_ms, goal=goal_ms, unit="ms", sense="at most", is_settled=is_settled
    )


def draw(levels: list[Level], path: Path) -> None:
    """The goodput curve as SVG."""
    loads = np.array([level.load * PEAK_PER_S for level in levels])
    names = (
        ("offered", [level.offered_per_s for level in levels]),
        ("served in time", [level.goodput_per_s for level in levels]),
        ("refused", [level.refused_per_s for level in levels]),
    )
    chart = Chart(
        name="overload",
        title="Goodput under overload",
        x_label="requests offered per second",
        y_label="requests per second",
        series=tuple(Series(name=name, x=loads, y=np.array(values)) for name, values in names),
        has_marks=True,
    )
    path.write_text(svg(chart), encoding="utf-8")
    print(f"\nwritten: {path}")


def main() -> None:
    """Measure and tell."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the curve as SVG")
    parser.add_argument("--fronts", type=int, default=1, help="front processes (default: 1)")
    options = parser.parse_args()
    levels = measure(20.0 if options.full else 5.0, options.fronts)
    rows = [
        (
            f"{level.load:g}x",
            level.offered_per_s,
            level.served_per_s,
            level.goodput_per_s,
            level.refused_per_s,
            level.refusal_p50_ms,
            level.refusal_p99_ms,
            level.health_p99_ms,
            level.health_max_ms,
            level.client_lag_p99_ms,
        )
        for level in levels
    ]
    title = f"{NUM_SLOTS} slots, steps of {STEP_S * 1e3:.0f} ms, a queue of {MAX_WAITING}"
    print_table(title, _HEADER, rows)
    checks = checks_of(levels)
    print_checks(checks)
    if options.picture is not None:
        draw(levels, options.picture)
    write_json(options.json, [asdict(level) for level in levels], checks)


if __name__ == "__main__":
    main()
