"""Measures the benefit of scheduling with five policies on one trace, at increasing load.

In-flight FCFS is the reference: load 1 is the highest load at which it meets the targets for 90 %
of the requests. `fair` has only the fair order. `penstock` also uses the targets: each request has
the TTFT target as its deadline and is rejected if it is predicted to miss it, and steps are sized
for the ITL target. Further sections: a tight ITL target, a low-rate tenant next to a flood,
two tenants that overload the server, deadlines, and the CPU time of the simulation. All runs are in
virtual time, in parallel processes.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceError, TraceRequest
from penstock.server.usable_cores import num_usable_cores
from penstock.tools.pages import finite_or_none
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.synthetic import (
    ArrivalProcess,
    SyntheticConfig,
    TenantShare,
    synthetic_trace,
)
from penstock.tools.simulation.trace_files import read_trace
from penstock.tools.simulation.transform import TransformConfig, transformed
from penstock.tools.targets import Targets
from policy_capacity import capacity
from policy_sections import (
    DEADLINE_KINDS,
    FCFS,
    Bench,
    Raw,
    Section,
    deadlines,
    neighbour,
    rising_load,
    served_shares,
    slowdown,
    speed,
    tight_itl,
)
from policy_sweep import Sweep, sweep
from report import Check, Outcome, RunFailed, arguments, at_least, at_most, print_table, run

QUICK_WINDOW_S = 600.0
_SHORT_RUN: dict[str, Any] = {"duration_s": 200.0, "seed": 1}
SYNTHETIC = {
    "long-prompts": SyntheticConfig(
        rate_per_s=2.0,
        duration_s=QUICK_WINDOW_S,
        mean_prompt_tokens=7000.0,
        max_prompt_tokens=32_768,
        mean_output_tokens=250.0,
        seed=1,
    ),
    "short-prompts": SyntheticConfig(
        rate_per_s=48.0, mean_prompt_tokens=300.0, mean_output_tokens=250.0, **_SHORT_RUN
    ),
    "heavy-tails": SyntheticConfig(
        rate_per_s=36.0,
        mean_prompt_tokens=500.0,
        prompt_sigma=1.6,
        max_prompt_tokens=32_768,
        mean_output_tokens=150.0,
        output_sigma=1.4,
        **_SHORT_RUN,
    ),
    "bursts": SyntheticConfig(
        rate_per_s=14.0,
        arrivals=ArrivalProcess.MMPP,
        mean_prompt_tokens=2000.0,
        mean_output_tokens=250.0,
        **_SHORT_RUN,
    ),
    "code": SyntheticConfig(
        rate_per_s=20.0, mean_prompt_tokens=2000.0, mean_output_tokens=28.0, **_SHORT_RUN
    ),
    "many-tenants": SyntheticConfig(
        rate_per_s=12.0,
        mean_prompt_tokens=2500.0,
        mean_output_tokens=250.0,
        # Shares as 1/n.
        tenants=tuple(TenantShare(name=f"t{n}", share=1.0 / n) for n in range(1, 41)),
        **_SHORT_RUN,
    ),
}
CAPACITY_PER_S = {kind: config.rate_per_s for kind, config in SYNTHETIC.items()}
CAPACITY_PER_S["long-prompts"] = 3.5
"""Requests per second at about the capacity of the default server."""
MOST_LOST_PERCENT = {"first token": 1.0, "whole": 5.0}
COSTS = {
    "default": CostModel(),
    # Steps of an 8-billion-parameter model of Llama's shape in bf16 on one H200, as CUDA graphs
    # replay them, without the host: 4.6 ms for one row, 7.6 ms for 128 rows of 640 tokens (2.7 ms
    # of it attention), 47 ms for a prefill of 2,048 tokens.
    "h200-8b": CostModel(
        step_s=0.0046, prefill_token_s=23e-6, decode_slot_s=3e-6, context_token_s=33e-9
    ),
}


def measure(args: argparse.Namespace) -> Outcome:
    """Find the capacity, run all sections and print them. Raises RunFailed if the trace or the
    options are invalid, or if no capacity is found.
    """
    end_s = TransformConfig().end_s if args.full else QUICK_WINDOW_S
    try:
        requests = (
            synthetic_trace(SYNTHETIC[args.synthetic])
            if args.trace is None
            else read_trace(args.trace)
        )
        trace = list(transformed(requests, TransformConfig(end_s=end_s)))
        base = SimulationConfig(
            cost=_cost(args.cost),
            targets=Targets(ttft_s=args.target_ttft_s, itl_s=0.1),
            num_blocks=args.num_blocks,
            batch_size=128,
            max_tokens=2048,
        )
    except (TraceError, ValueError) as error:
        raise RunFailed(str(error)) from error
    if not trace:
        raise RunFailed(f"{args.trace} has no requests")

    def good_shares(loads: Sequence[float]) -> list[float]:
        """Return the share of requests that meet their targets with FCFS, at each multiple of the
        trace's load.
        """
        trials = [Bench(base=base).trial(FCFS, load) for load in loads]
        return [result.summary.good_share for result in runs(trials)]

    with sweep(trace, args.jobs) as runs:
        load = capacity(trace, base, good_shares)
        results = _run_sections(runs, _sections(Bench(base=base, capacity=load), trace))
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    settings = {
        "requests": len(trace),
        "span_s": span_s,
        "capacity_per_s": load * len(trace) / span_s,
        "cost": dataclasses.asdict(base.cost),
    }
    print(f"\n{settings}")
    return finite_or_none({"capacity": load, "settings": settings, **results}), checks_of(results)


def _cost(text: str) -> CostModel:
    if text in COSTS:
        return COSTS[text]
    try:
        coefficients: Any = json.loads(text)
        return CostModel(**coefficients)
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--cost {text!r} is not {' or '.join(COSTS)}, nor coefficients: {error}"
        ) from (error)


def _sections(bench: Bench, trace: Sequence[TraceRequest]) -> list[Section]:
    hours = (trace[-1].arrival_s - trace[0].arrival_s) / 3600.0
    kinds = (rising_load, tight_itl, neighbour, served_shares, deadlines)
    return [*(kind(bench) for kind in kinds), speed(bench, hours)]


def _run_sections(runs: Sweep, sections: Sequence[Section]) -> dict[str, list[Raw]]:
    """Run all trials of all sections in parallel; print the tables, return results by section."""
    # The flood takes longest, so it is started first.
    ordered = sorted(sections, key=lambda section: section.key != "neighbour")
    done = iter(runs([trial for section in ordered for _, trial in section.trials]))
    found = {
        section.key: section.raw(
            [label for label, _ in section.trials], [next(done) for _ in section.trials]
        )
        for section in ordered
    }
    for section in sections:
        rows = [[column(row) for column in section.columns.values()] for row in found[section.key]]
        print_table(section.title, tuple(section.columns), rows)
    return found


def checks_of(results: Mapping[str, Sequence[Raw]]) -> list[Check]:
    """Compare the results with the goals; return one check for each comparison. `results`: the rows
    of each section, by section key.
    """
    rows = results["policies"]
    good = {(row["policy"], row["load"]): row["num_good"] for row in rows}
    waste = [row["kv_waste"] for row in rows if row["policy"] in {"fair", "penstock"}]
    late = [row for row in results["deadlines"] if row["policy"] == "penstock"]
    lost = {
        kind: max(row["prefill_waste"] for row in late if row["deadline"] == kind)
        for kind in DEADLINE_KINDS
    }
    checks = [
        # Both get the same requests, so the numbers of good requests are comparable.
        at_least(
            "good of penstock over fcfs, load 1.2",
            good["penstock", 1.2] / max(1, good["fcfs", 1.2]),
            *(1.3, "times"),
        ),
        *(
            at_most(f"prefill lost to deadlines, {kind}", 100 * share, MOST_LOST_PERCENT[kind], "%")
            for kind, share in lost.items()
        ),
        at_least("in time at load 1.5 over the greatest, whole", _kept_share(late), 0.9, "times"),
        *(
            at_most(
                f"p99 TTFT beside a flood over alone, {row['policy']}", slowdown(row), 1.5, "times"
            )
            for row in results["neighbour"]
            if row["policy"] != "fcfs"
        ),
        at_most("KV waste, worst load", 100 * max(waste), 4.0, "%"),
    ]
    slowest_s = max(row["cpu_s_per_hour"] for row in results["speed"])
    return [*checks, at_most("an hour as recorded, CPU time", slowest_s, 30.0, "s")]


def _kept_share(rows: Sequence[Raw]) -> float:
    """Return the rate of requests completed in time at the highest load, divided by the maximum of
    that rate over all loads.
    """
    rates = {row["load"]: row["requests_per_s"] for row in rows if row["deadline"] == "whole"}
    return float(rates[max(rates)] / max(rates.values()))


def main() -> None:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="default: synthetic traffic")
    add("--synthetic", choices=SYNTHETIC, default="long-prompts", help="without --trace")
    add("--jobs", type=int, default=num_usable_cores(), help="parallel runs (default: cores)")
    known = ", ".join(COSTS)
    add("--cost", default="default", metavar="NAME|JSON", help=f"{known}, or fields of CostModel")
    add("--num-blocks", type=int, default=16_384)
    add("--target-ttft-s", type=float, default=1.0)
    run(parser, measure)


if __name__ == "__main__":
    main()
