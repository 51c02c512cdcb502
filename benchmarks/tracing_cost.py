"""The overhead of tracing every request: CPU time of the front-end process, throughput, event-loop
lag.

A real `penstock serve` with one front process on the simulated executor (steps of 5 ms, prompts of
64 tokens, 16 tokens each) without an observer, and with traces of all requests sent to a collector
that works, one that is down (a closed port) and one that hangs (accepts spans and never responds).
For comparison, with a bare grpc.aio server and the same messages: spans of the SDK built on the
event loop when a request ends, the interceptor of opentelemetry-instrumentation-grpc, and initial
metadata only. All variants run throughout and are measured alternately: first an open loop at one
rate (the same Poisson arrivals for all), then a closed loop of 128 requests for the maximum
throughput.

    python benchmarks/tracing_cost.py [--full] [--rate PER_S] [--json FILE]

Measurements. CPU time per request: of all threads of the front process, and of the event loop's
thread alone, as reported by the kernel at both ends of a window; compared with the base of the
variant (no tracing, or bare grpc.aio) in the same round. Lag: the lateness of a ticker with a
period of 5 ms in each event loop. Observer: its CPU time during the run, divided by the number of
requests. The record path is also measured alone (`tracing_record_path.py`). Reports medians over
the rounds; "+-" is one standard error of the preceding difference, which grows with other load on
the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import attrgetter

import numpy as np

import native_build
from report import (
    Check,
    RunFailed,
    arguments,
    at_least,
    at_most,
    print_checks,
    print_table,
    progress,
    write_json,
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
    Side,
    Turn,
    base_of,
    sides_up,
)

MAX_LOOP_US = 10.0
MIN_THROUGHPUT = 0.98
MAX_LAG_MS = 2.0
MAX_RATE_PER_S = 1000.0
SHARE_OF_MOST = 0.6
NUM_AT_ONCE = 128
NUM_ATTEMPTS = 3
HEADER = (
    *("side", "front us", "over base", "loop us", "over base", "+-", "per s", "most per s"),
    *("lag p50 ms", "lag p99 ms", "first p99 ms"),
)
_KEYS = (
    *("side", "front_us", "front_added_us", "loop_us", "loop_added_us", "loop_added_error_us"),
    *("per_s", "most_per_s", "lag_p50_ms", "lag_p99_ms", "first_p99_ms"),
)
SPANS_HEADER = ("side", "requests", "roots", "spans", "dropped", "observer us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The amount of work. `rate_per_s` None: a share of the machine's maximum rate."""

    num_rounds: int
    warm_s: float
    window_s: float
    most_window_s: float
    num_batches: int
    rate_per_s: float | None


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The measurements of each variant, by round: at the given rate, and at the maximum rate."""

    rate_per_s: float
    at_rate: dict[str, list[Turn]] = field(default_factory=dict[str, list[Turn]])
    at_most: dict[str, list[Turn]] = field(default_factory=dict[str, list[Turn]])

    def median(self, side: str, value: Callable[[Turn], float], *, most: bool = False) -> float:
        """Return the median over the rounds."""
        turns = (self.at_most if most else self.at_rate)[side]
        return statistics.median(map(value, turns))

    def added(self, side: str, value: Callable[[Turn], float]) -> float:
        """Return the difference from the variant's base, median over the rounds."""
        return statistics.median(self._differences(side, value))

    def error(self, side: str, value: Callable[[Turn], float]) -> float:
        """Return one standard error of the mean difference from the variant's base."""
        differences = self._differences(side, value)
        return statistics.stdev(differences) / math.sqrt(len(differences))

    def ratio(self, side: str, *, most: bool) -> float:
        """Return the variant's throughput divided by its base's, median over the rounds."""
        of = self.at_most if most else self.at_rate
        both = zip(of[side], of[base_of(side)], strict=True)
        return statistics.median(one.per_s / base.per_s for one, base in both)

    def _differences(self, side: str, value: Callable[[Turn], float]) -> list[float]:
        both = zip(self.at_rate[side], self.at_rate[base_of(side)], strict=True)
        return [value(one) - value(base) for one, base in both]

    def lag_ms(self, side: str, percent: float) -> float:
        """Return a percentile of the tick lateness at the given rate, median over the rounds."""
        return self.median(side, lambda turn: float(np.percentile(turn.lags_ms, percent)))


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan; the quick run takes less than two minutes."""
    rate: float | None = options.rate
    if options.full:
        return Plan(
            num_rounds=12, warm_s=0.5, window_s=3.0, most_window_s=2.0, num_batches=60,
            rate_per_s=rate,
        )  # fmt: skip
    return Plan(
        num_rounds=4, warm_s=0.3, window_s=1.2, most_window_s=0.8, num_batches=15, rate_per_s=rate
    )


def left_out() -> dict[str, str]:
    """Return the variants that cannot be measured on this machine, with the reason."""
    if importlib.util.find_spec("opentelemetry.instrumentation") is None:
        return {CONTRIB: "opentelemetry-instrumentation-grpc is not installed"}
    return {}


def run(plan: Plan, sides: dict[str, Side]) -> Rounds:
    """Run all rounds; the variants alternate, and each round begins with a different one."""
    for side in sides.values():
        side.begin_count()
        _turn(side, 0, plan, most=True)
    rate = plan.rate_per_s
    if rate is None:
        most = statistics.median(_turn(sides[OFF], n, plan, most=True).per_s for n in range(3))
        rate = min(MAX_RATE_PER_S, SHARE_OF_MOST * most)
    rounds = Rounds(rate_per_s=rate)
    for number in range(plan.num_rounds):
        order = list(sides)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            if name in PEERS and number % 2:
                continue  # larger differences: half the rounds suffice
            seed = number + 1
            at_rate = _turn(sides[name], seed, plan, rate=rate)
            at_most = _turn(sides[name], seed, plan, most=True)
            rounds.at_rate.setdefault(name, []).append(at_rate)
            rounds.at_most.setdefault(name, []).append(at_most)
            progress(
                f"round {number + 1}  {name:<26}  {at_rate.front_us:7.0f} us"
                f"  {at_rate.per_s:6.0f} of {rate:.0f} per s  most {at_most.per_s:6.0f}"
                f"  others {at_rate.foreign_cores:.1f} cores"
            )
    for side in sides.values():
        side.end_count()
    return rounds


def _turn(side: Side, seed: int, plan: Plan, *, rate: float = 0.0, most: bool = False) -> Turn:
    if most:
        return side.turn(seed, plan.warm_s, plan.most_window_s, concurrency=NUM_AT_ONCE)
    return side.turn(seed, plan.warm_s, plan.window_s, rate=rate)


def rows_of(rounds: Rounds) -> list[list[object]]:
    """Return one row per variant."""
    return [
        [
            side,
            rounds.median(side, attrgetter("front_us")),
            rounds.added(side, attrgetter("front_us")),
            rounds.median(side, attrgetter("loop_us")),
            rounds.added(side, attrgetter("loop_us")),
            rounds.error(side, attrgetter("loop_us")),
            rounds.median(side, attrgetter("per_s")),
            rounds.median(side, attrgetter("per_s"), most=True),
            rounds.lag_ms(side, 50),
            rounds.lag_ms(side, 99),
            rounds.median(side, attrgetter("first_p99_ms")),
        ]
        for side in rounds.at_rate
    ]


def span_rows(sides: dict[str, Side]) -> list[list[object]]:
    """Return the counts of traces by outcome, and the observer's CPU time per request."""
    return [
        [
            side.name,
            side.num_requests,
            side.spans.get("num_roots", 0),
            side.spans.get("num_spans", 0),
            int(side.num_dropped),
            side.observer_s * 1e6 / max(1, side.num_requests),
        ]
        for side in sides.values()
        if side.name not in (OFF, *PEERS[:2])
    ]


def checks_of(rounds: Rounds, path: RecordPath) -> list[Check]:
    """Return the checks of all figures with a goal."""
    checks = [
        at_most("the record path alone, added to a request", path.added, MAX_LOOP_US, "us"),
        at_most(
            "collector up: thread of the event loop, added to a request",
            rounds.added(UP, attrgetter("loop_us")),
            MAX_LOOP_US,
            "us",
        ),
    ]
    for side in (UP, DEAD, HANGING):
        for most, where in ((False, f"{rounds.rate_per_s:.0f} requests/s"), (True, "saturation")):
            checks.append(
                at_least(
                    f"{side}: throughput at {where} over none",
                    rounds.ratio(side, most=most),
                    MIN_THROUGHPUT,
                    "x",
                )
            )
        growth_ms = rounds.lag_ms(side, 99) - rounds.lag_ms(OFF, 99)
        name = f"{side}: growth of the loop's lag, p99"
        checks.append(at_most(name, growth_ms, MAX_LAG_MS, "ms"))
    return checks


def _document(rounds: Rounds, sides: dict[str, Side], path: RecordPath) -> dict[str, object]:
    def as_json(turns: dict[str, list[Turn]]) -> dict[str, list[dict[str, float]]]:
        names = ("per_s", "front_us", "loop_us", "first_p99_ms", "foreign_cores")
        return {
            side: [{name: getattr(turn, name) for name in names} for turn in each]
            for side, each in turns.items()
        }

    return {
        "rate_per_s": rounds.rate_per_s,
        "sides": [dict(zip(_KEYS, row, strict=True)) for row in rows_of(rounds)],
        "spans": [dict(zip(SPANS_HEADER, row, strict=True)) for row in span_rows(sides)],
        "record_path_us": asdict(path),
        "at_rate": as_json(rounds.at_rate),
        "at_most": as_json(rounds.at_most),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rate", type=float, metavar="PER_S", help="requests a second (default: 60 %% of the most)"
    )
    options = parser.parse_args()
    plan, missing = plan_of(options), left_out()
    try:
        native_build.load_client()
        path = measure_record_path(plan.num_batches)
        with sides_up(tuple(name for name in (*PENSTOCK, *PEERS) if name not in missing)) as sides:
            rounds = run(plan, sides)
    except (native_build.CannotBuild, RunFailed) as error:
        raise SystemExit(f"tracing_cost.py: {error}") from None
    print_table(f"At {rounds.rate_per_s:.0f} requests/s (medians)", HEADER, rows_of(rounds))
    print_table("Traces, and the observer's processor time a request", SPANS_HEADER,
                span_rows(sides))  # fmt: skip
    print_table(
        "The record path alone, us a request of the event loop's thread",
        tuple(asdict(path)),
        [tuple(asdict(path).values())],
    )
    checks = checks_of(rounds, path)
    print_checks(checks)
    for side, why in missing.items():
        print(f"\nleft out: {side}: {why}")
    foreign = statistics.median(t.foreign_cores for each in rounds.at_rate.values() for t in each)
    print(f"\nothers used {foreign:.1f} of {os.cpu_count()} cores meanwhile (median)")
    write_json(options.json, _document(rounds, sides, path), checks)


if __name__ == "__main__":
    main()
