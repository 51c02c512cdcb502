"""Measures the overhead of tracing every request in CPU time of the front (gRPC server process),
throughput and event-loop lag.

Measures `penstock serve` with one front process on the simulated executor (steps of 5 ms, prompts
of 64 tokens, 16 tokens each) without an observer (the process that exports traces), and with traces
of all requests sent to a collector that works, one that is down (a closed port) and one that hangs
(accepts spans and never responds). For comparison, a bare grpc.aio server with the same messages is
measured without tracing and with one of three additions: spans of the SDK built on the event loop
when a request ends, the interceptor of opentelemetry-instrumentation-grpc, or initial metadata. The
servers of all variants stay up, and get each load alternately: first an open loop at one rate (the
same Poisson arrivals for all), then a closed loop of 128 requests for the maximum throughput.

    python benchmarks/tracing_cost.py [--full] [--json FILE]

Measurements. CPU time per request: of all threads of the front process, and of only the event
loop's thread, as reported by the kernel at both ends of a window; compared with the base of the
variant (no tracing, or bare grpc.aio) in the same round. Lag: the lateness of a ticker with a
period of 5 ms in each event loop. Observer: its CPU time during the run, divided by the number of
requests. The record path is also measured separately (`tracing_record_path.py`). Reports medians
over the rounds. `loop_error_us`, one standard error of the mean of `loop_us`, grows with other load
on the machine.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

import native_build
from report import (
    Check,
    Outcome,
    arguments,
    at_least,
    at_most,
    medians,
    over,
    print_rows,
    progress,
    run,
)
from tracing_record_path import RecordPath, measure_record_path
from tracing_sides import (
    CONTRIB,
    DEAD,
    HANGING,
    OFF,
    PEERS,
    PENSTOCK,
    UP,
    RunResult,
    Side,
    base_of,
    started_sides,
)

MAX_LOOP_US = 10.0
MIN_THROUGHPUT = 0.98
MAX_LAG_MS = 2.0
MAX_RATE_PER_S = 1000.0
SHARE_OF_MOST = 0.6
NUM_AT_ONCE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The number of rounds, the durations in seconds, and the number of batches of the record path.

    The quick run takes less than two minutes.
    """

    num_rounds: int
    warm_s: float
    window_s: float
    most_window_s: float
    num_batches: int


_PLANS = {
    False: Plan(num_rounds=4, warm_s=0.3, window_s=1.2, most_window_s=0.8, num_batches=15),
    True: Plan(num_rounds=12, warm_s=0.5, window_s=3.0, most_window_s=2.0, num_batches=60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """For each figure, the difference between a variant and its base: the median over the rounds.

    `loop_error_us`: one standard error of the mean of `loop_us`.
    """

    side: str
    front_us: float
    loop_us: float
    loop_error_us: float
    lag_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The numbers of requests, root spans, spans and dropped records of a variant, and the
    observer's CPU time per request, microseconds.
    """

    side: str
    num_requests: int
    num_roots: int
    num_spans: int
    num_dropped: int
    observer_us: float


def all_runs(plan: Plan, sides: dict[str, Side]) -> list[RunResult]:
    """Run all rounds, in which the variants alternate, beginning with a different one each time;
    return all measurements.

    The open loop has a share of the machine's maximum rate without tracing, at most
    `MAX_RATE_PER_S`. The grpc.aio variants are measured in every second round only.
    """

    def most_per_s(side: Side, seed: int) -> float:
        found = side.run_load(seed, plan.warm_s, plan.most_window_s, concurrency=NUM_AT_ONCE)
        return found.per_s

    for side in sides.values():
        side.begin_count()
        most_per_s(side, 0)
    most = statistics.median(most_per_s(sides[OFF], number) for number in range(3))
    rate = min(MAX_RATE_PER_S, SHARE_OF_MOST * most)
    runs: list[RunResult] = []
    names = list(sides)
    for number in range(plan.num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in PEERS and number % 2:
                continue  # larger differences: half the rounds suffice
            at_rate = sides[name].run_load(number + 1, plan.warm_s, plan.window_s, rate=rate)
            runs.append(replace(at_rate, most_per_s=most_per_s(sides[name], number + 1)))
            progress(f"round {number + 1}  {name:<26}  {at_rate.front_us:7.0f} us of {rate:.0f}/s")
    for side in sides.values():
        side.end_count()
    return runs


def of_side(runs: Sequence[RunResult], side: str) -> tuple[list[RunResult], list[RunResult]]:
    """Return the runs of a variant, and the runs of its base in the same rounds."""
    mine = [one for one in runs if one.side == side]
    rounds = {one.round for one in mine}
    base = [one for one in runs if one.side == base_of(side) and one.round in rounds]
    return mine, base


def added(runs: Sequence[RunResult], side: str) -> Added:
    """Return, for each figure, the difference between a variant and its base."""
    pairs = list(zip(*of_side(runs, side), strict=True))
    loop_us = [one.loop_us - base.loop_us for one, base in pairs]
    return Added(
        side=side,
        front_us=statistics.median(one.front_us - base.front_us for one, base in pairs),
        loop_us=statistics.median(loop_us),
        loop_error_us=statistics.stdev(loop_us) / math.sqrt(len(loop_us)),
        lag_p99_ms=statistics.median(one.lag_p99_ms - base.lag_p99_ms for one, base in pairs),
    )


def traces_of(side: Side) -> Traces:
    """Return the counts of a variant; the counts of spans are 0 if no collector counts them."""
    return Traces(
        side=side.name,
        num_requests=side.num_requests,
        num_roots=side.spans.get("num_roots", 0),
        num_spans=side.spans.get("num_spans", 0),
        num_dropped=int(side.num_dropped),
        observer_us=side.observer_s * 1e6 / max(1, side.num_requests),
    )


def checks_of(runs: Sequence[RunResult], path: RecordPath) -> list[Check]:
    """Return the checks of all figures with a goal."""
    name = "collector up: thread of the event loop, added to a request"
    checks = [
        at_most("the record path alone, added to a request", path.added, MAX_LOOP_US, "us"),
        at_most(name, added(runs, UP).loop_us, MAX_LOOP_US, "us"),
    ]
    for side in (UP, DEAD, HANGING):
        mine, base = of_side(runs, side)
        for figure, where in (("per_s", "the given rate"), ("most_per_s", "saturation")):
            ratio = over(mine, base, figure)
            name = f"{side}: throughput at {where} over none"
            checks.append(at_least(name, ratio, MIN_THROUGHPUT, "x"))
        growth_ms = added(runs, side).lag_p99_ms
        checks.append(
            at_most(f"{side}: growth of the loop's lag, p99", growth_ms, MAX_LAG_MS, "ms")
        )
    return checks


def measure(options: Namespace) -> Outcome:
    """Measure the record path, then all variants of this machine."""
    native_build.load_client()
    plan = _PLANS[options.full]
    path = measure_record_path(plan.num_batches)
    has_contrib = importlib.util.find_spec("opentelemetry.instrumentation") is not None
    names = tuple(name for name in (*PENSTOCK, *PEERS) if name != CONTRIB or has_contrib)
    if not has_contrib:
        progress(f"left out: {CONTRIB}: opentelemetry-instrumentation-grpc is not installed")
    with started_sides(names) as sides:
        runs = all_runs(plan, sides)
        traces = [traces_of(side) for side in sides.values() if side.service or side.count]
    print_rows("Variants at the rate, and their maximum (medians)", medians(runs, "side"))
    bases = {base_of(name) for name in names}
    additions = [added(runs, name) for name in names if name not in bases]
    print_rows("Added to no tracing, or to bare grpc.aio", additions)
    print_rows("Traces, and the observer's CPU time per request", traces)
    print_rows("The record path alone, us a request of the event loop's thread", [path])
    results = {"turns": runs, "added": additions, "traces": traces, "record_path_us": path}
    return results, checks_of(runs, path)


if __name__ == "__main__":
    run(arguments(__doc__), measure)
