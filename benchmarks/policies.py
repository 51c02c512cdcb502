"""What the order of requests is worth: four policies on one trace, at rising load, in one run.

In-flight FCFS sets the scale: load 1 is the most at which it still meets its targets for 90 % of
the requests. Then a flooding tenant beside a quiet one, deadlines under overload, the hit rate of
the prefix cache against one that knows the future (traces with prefix ids), and how long the trace
takes at the speed it was recorded at. Everything runs in virtual time on one core.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.scheduler.cost_model import CostModel
from penstock.server.simulation.chart import Chart, Series, svg
from penstock.server.simulation.optimal_cache import optimal_hit_rate
from penstock.server.simulation.png_plots import has_matplotlib, write_png
from penstock.server.simulation.report import finite_or_none, page
from penstock.server.simulation.settings import Policy, SimulationConfig, Targets
from penstock.server.simulation.simulate import SimulationRun, simulate
from penstock.server.simulation.summary import Summary, summarise
from penstock.server.simulation.trace import TraceRequest
from penstock.server.simulation.trace_files import read_trace
from penstock.server.simulation.transform import TransformConfig, merged, transformed
from report import Check, arguments, print_checks, print_table, write_json

POLICIES = (Policy.STATIC, Policy.DYNAMIC, Policy.FCFS, Policy.FAIR)
LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
GOOD_SHARE = 0.9
QUICK_WINDOW_S = 600.0
NUM_HALVINGS = 6
NUM_FLOODS = 10
_HEADER = (
    *("load", "policy", "good/s", "good %", "TTFT p50", "p99 s", "ITL p50", "p99 ms"),
    *("KV %", "waste %", "hits %"),
)
_HITS = ("hits", "all", "free")


class Comparison:
    """Runs of one trace on one simulated server."""

    def __init__(self, trace: list[TraceRequest], config: SimulationConfig) -> None:
        self.trace = trace
        self.config = config

    def run(
        self,
        policy: Policy,
        load: float,
        trace: Iterable[TraceRequest] | None = None,
        **changes: Any,
    ) -> tuple[SimulationRun, Summary]:
        """One run; `changes` are fields of TransformConfig."""
        shaped = transformed(
            self.trace if trace is None else trace, TransformConfig(load=load, **changes)
        )
        run = simulate(shaped, dataclasses.replace(self.config, policy=policy))
        print(f"  {policy} at {load:.2f}x: {run.wall_s:.1f} s", file=sys.stderr)
        return run, summarise(run)

    def capacity(self) -> float:
        """The greatest load at which FCFS meets its targets for 90 % of the requests."""
        low, high = 0.0, 1.0
        while self._meets(high):
            low, high = high, 2.0 * high
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self._meets(middle) else (low, middle)
        if not low:
            raise SystemExit("FCFS misses its targets at any load: give it a faster --cost")
        return low

    def _meets(self, load: float) -> bool:
        return self.run(Policy.FCFS, load)[1].good_share >= GOOD_SHARE


def compare(bench: Comparison, capacity: float) -> list[dict[str, Any]]:
    """Every policy at every load."""
    rows: list[dict[str, Any]] = []
    for share, policy in itertools.product(LOADS, POLICIES):
        _, summary = bench.run(policy, share * capacity)
        rows.append({"policy": str(policy), "load": share, **dataclasses.asdict(summary)})
    print_table(
        f"Policies; load 1 is {capacity:.2f} times the trace's own",
        _HEADER,
        [
            (
                row["load"],
                row["policy"],
                row["goodput_per_s"],
                100 * row["good_share"],
                row["ttft"]["p50_s"],
                row["ttft"]["p99_s"],
                1e3 * row["itl"]["p50_s"],
                1e3 * row["itl"]["p99_s"],
                100 * row["kv_utilisation"],
                100 * row["kv_waste"],
                100 * row["prefix_hit_rate"],
            )
            for row in rows
        ],
    )
    return rows


def noisy_neighbour(bench: Comparison, capacity: float) -> dict[str, float]:
    """p99 TTFT of a tenant at a tenth of capacity: alone, and beside a flood of ten times capacity.

    The quiet tenant has every tenth request of the trace and the flood is ten copies of it, so that
    both have its lengths.
    """
    quiet = [dataclasses.replace(request, tenant="quiet") for request in bench.trace[::10]]
    flood = [
        dataclasses.replace(request, tenant="flood")
        for request in bench.trace
        for _ in range(NUM_FLOODS)
    ]
    noisy = list(merged(quiet, flood))
    figures: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    for name, policy, trace in (
        ("alone", Policy.FCFS, quiet),
        ("fcfs", Policy.FCFS, noisy),
        ("fair", Policy.FAIR, noisy),
    ):
        _, summary = bench.run(policy, capacity, trace)
        its = next(tenant for tenant in summary.tenants if tenant.tenant == "quiet")
        figures[name] = its.ttft.p99_s
        ratio = summary.served_ratio
        rows.append((name, its.ttft.p50_s, its.ttft.p99_s, 100 * its.good_share, ratio))
    print_table(
        "Quiet tenant at a tenth of capacity, beside a flood of ten times capacity",
        ("", "TTFT p50 s", "p99 s", "good %", "served ratio"),
        rows,
    )
    return figures


def deadlines(bench: Comparison, capacity: float) -> list[dict[str, Any]]:
    """Everybody has a deadline for the first token, at 1.5 times the capacity."""
    rows: list[dict[str, Any]] = []
    target_s = bench.config.targets.ttft_s
    for policy in (Policy.FCFS, Policy.FAIR):
        _, summary = bench.run(policy, 1.5 * capacity, ttft_deadline_s=2.0 * target_s)
        rows.append({"policy": str(policy), **dataclasses.asdict(summary)})
    print_table(
        f"All with a TTFT deadline of {2.0 * target_s:g} s, load 1.5",
        ("policy", "good/s", "completed", "of", "prefill lost %"),
        [
            (
                row["policy"],
                row["goodput_per_s"],
                row["num_completed"],
                row["num_requests"],
                100 * row["prefill_waste"],
            )
            for row in rows
        ],
    )
    return rows


def prefix_reuse(bench: Comparison, capacity: float) -> list[dict[str, float]]:
    """Hit rates at three sizes of memory, and those of a cache that knows the future."""
    rows: list[dict[str, float]] = []
    for size in (0.5, 1.0, 2.0):
        num_blocks = int(size * bench.config.num_blocks)
        sized = Comparison(bench.trace, dataclasses.replace(bench.config, num_blocks=num_blocks))
        _, summary = sized.run(Policy.FAIR, 0.5 * capacity)
        bound = optimal_hit_rate(
            bench.trace,
            num_cache_tokens=num_blocks * bench.config.block_size,
            block_size=bench.config.block_size,
        )
        # What running requests hold is no room for the past.
        free = optimal_hit_rate(
            bench.trace,
            num_cache_tokens=int(
                num_blocks * bench.config.block_size * (1.0 - summary.kv_utilisation)
            ),
            block_size=bench.config.block_size,
        )
        rows.append(
            {"num_blocks": num_blocks, "hits": summary.prefix_hit_rate, "all": bound, "free": free}
        )
    print_table(
        "Prefix hits % at half the capacity; Belady with all memory, and with what runs leave free",
        ("blocks", *_HITS),
        [(row["num_blocks"], *(100 * row[name] for name in _HITS)) for row in rows],
    )
    return rows


def checks_of(
    rows: list[dict[str, Any]],
    neighbour: dict[str, float],
    late: list[dict[str, Any]],
    reuse: list[dict[str, float]],
) -> list[Check]:
    """The figures against their goals."""
    good = {(row["policy"], row["load"]): row["num_good"] for row in rows}
    kept = [row["kv_waste"] for row in rows if row["policy"] == "fair"]
    checks = [
        _check("goodput of fair over fcfs at load 1.2", good["fair", 1.2] / good["fcfs", 1.2], 1.3),
        _check("KV waste, worst load", 100 * max(kept), 4.0, "%", is_most=True),
        _check("prefill lost to deadlines", 100 * late[1]["prefill_waste"], 1.0, "%", is_most=True),
        _check(
            "quiet tenant's p99 TTFT beside a flood over alone",
            neighbour["fair"] / neighbour["alone"],
            1.5,
            is_most=True,
        ),
    ]
    return checks + [
        _check(f"hits over Belady's, {row['num_blocks']} blocks", row["hits"] / row["all"], 0.95)
        for row in reuse
    ]


def _check(
    name: str, value: float, goal: float, unit: str = "times", *, is_most: bool = False
) -> Check:
    return Check(
        name=name,
        value=value,
        goal=goal,
        unit=unit,
        sense="at most" if is_most else "at least",
    )


def charts_of(rows: list[dict[str, Any]]) -> tuple[Chart, ...]:
    """Curves over the load, one line per policy."""

    def chart(name: str, title: str, unit: str, *path: str) -> Chart:
        return Chart(
            name=name,
            title=title,
            x_label="load (1: in-flight FCFS serves 90 % well)",
            y_label=unit,
            series=tuple(
                Series(
                    name=str(policy),
                    x=np.array(LOADS),
                    y=np.array([_at(row, path) for row in rows if row["policy"] == policy]),
                )
                for policy in POLICIES
            ),
        )

    return (
        chart("goodput", "Goodput", "good requests/s", "goodput_per_s"),
        chart("ttft_p50", "Median time to first token", "seconds", "ttft", "p50_s"),
        chart("ttft_p99", "p99 time to first token", "seconds", "ttft", "p99_s"),
        chart("itl_p99", "p99 time between tokens", "seconds", "itl", "p99_s"),
        chart("kv", "KV blocks in use", "share", "kv_utilisation"),
    )


def _at(row: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = row
    for name in path:
        value = value[name]
    return float(value)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a page and plots")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=16_384)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--target-ttft-s", type=float, default=1.0)
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    args = parser.parse_args()
    end_s = TransformConfig().end_s if args.full else QUICK_WINDOW_S
    trace = list(transformed(read_trace(args.trace), TransformConfig(end_s=end_s)))
    config = SimulationConfig(
        cost=CostModel(),
        targets=Targets(ttft_s=args.target_ttft_s, itl_s=args.target_itl_ms / 1e3),
        max_num_seqs=args.max_num_seqs,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
    )
    bench = Comparison(trace, config)
    capacity = bench.capacity()
    rows = compare(bench, capacity)
    neighbour = noisy_neighbour(bench, capacity)
    late = deadlines(bench, capacity)
    has_prefixes = any(request.prefix_ids for request in trace)
    reuse = prefix_reuse(bench, capacity) if has_prefixes else []
    speed, _ = bench.run(Policy.FCFS, 1.0)
    checks = checks_of(rows, neighbour, late, reuse)
    hours = trace[-1].arrival_s / 3600.0
    # Told per hour of traffic: the quick run is a part of one.
    checks.append(
        _check(
            "an hour of the trace as recorded, CPU time",
            speed.cpu_s / hours,
            30.0,
            "s",
            is_most=True,
        )
    )
    print_checks(checks)
    if args.report is not None:
        args.report.mkdir(parents=True, exist_ok=True)
        charts = charts_of(rows)
        text = page("Scheduling policies", [svg(chart) for chart in charts])
        (args.report / "policies.html").write_text(text, encoding="utf-8")
        if has_matplotlib():
            write_png(charts, args.report)
    results = {
        "capacity": capacity,
        "policies": rows,
        "neighbour": neighbour,
        "deadlines": late,
        "prefix_reuse": reuse,
    }
    write_json(args.json, finite_or_none(results), checks)


if __name__ == "__main__":
    main()
