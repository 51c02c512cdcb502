"""The benefit of scheduling: five policies on one trace, at increasing load, in one run.

In-flight FCFS is the reference: load 1 is the highest load at which it meets the targets for 90 %
of the requests. `fair` is the fair order alone; `penstock` also uses the targets: every request has
the TTFT target as its deadline, so late requests are predicted, and steps are sized for the ITL
target. Further sections: a tight ITL target, a low-rate tenant next to a flood, deadlines, the
prefix cache compared with an optimal one (traces with prefix ids), and the run time of the
simulation. All runs are in virtual time, in parallel processes.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceError, TraceRequest
from penstock.server.usable_cores import num_usable_cores
from penstock.tools.charts import Chart, has_matplotlib, write_png
from penstock.tools.pages import finite_or_none
from penstock.tools.simulation.settings import SimulationConfig
from penstock.tools.simulation.synthetic import SyntheticConfig, synthetic_trace
from penstock.tools.simulation.trace_files import read_trace
from penstock.tools.simulation.transform import TransformConfig, transformed
from penstock.tools.targets import Targets
from plain_variants import VARIANTS, use
from policy_bench import CONTENDERS, FCFS, Bench, Section
from policy_capacity import NoCapacity, capacity
from policy_memory import PrefixReuse, Speed
from policy_sections import DEADLINE_KINDS, Deadlines, RisingLoad, TightItl
from policy_sweep import Sweep, SweepProgress, sweep
from policy_tenants import NoisyNeighbour, ServedShares, slowdown
from report import (
    Check,
    arguments,
    at_least,
    at_most,
    print_checks,
    print_table,
    progress,
    write_json,
)
from report_page import Table, lines, write_page

PAGE_FILE = "policies.html"
QUICK_WINDOW_S = 600.0
LONG_PROMPTS = SyntheticConfig(
    rate_per_s=2.0,
    duration_s=QUICK_WINDOW_S,
    mean_prompt_tokens=7000.0,
    max_prompt_tokens=32_768,
    mean_output_tokens=250.0,
    seed=1,
)
"""The synthetic traffic if no trace is given."""
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


def main() -> None:
    args = _arguments().parse_args()
    try:
        _compare(args)
    except (TraceError, NoCapacity, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


def _compare(args: argparse.Namespace) -> None:
    start_s = time.monotonic()
    end_s = TransformConfig().end_s if args.full else QUICK_WINDOW_S
    requests = synthetic_trace(LONG_PROMPTS) if args.trace is None else read_trace(args.trace)
    trace = list(transformed(requests, TransformConfig(end_s=end_s)))
    if not trace:
        raise ValueError(f"{args.trace} has no requests")
    base = _base(args)
    with sweep(trace, args.jobs, _print_progress, partial(use, args.variant)) as runs:
        load = capacity(trace, base, partial(_good_shares, runs, base))
        bench = Bench(base=base, capacity=load)
        results, tables = _run_sections(runs, _sections(bench, trace, args))
    checks = checks_of(results)
    for table in tables:
        print_table(table.title, table.header, table.rows)
        print(table.note)
    print_checks(checks)
    wall_s = time.monotonic() - start_s
    settings = _settings(args, trace, load)
    print(f"\n{settings}\n{wall_s:,.0f} s in all")
    if args.report is not None:
        charts = charts_of(results["policies"], base.targets.ttft_s)
        title = "Scheduling policies compared"
        write_page(args.report / PAGE_FILE, title, tables, charts, checks, settings)
        if has_matplotlib():
            write_png(charts, args.report)
    document = {"capacity": load, "settings": settings, "wall_s": wall_s, **results}
    write_json(args.json, finite_or_none(document), checks)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="default: synthetic, prompts of 7,000 tokens"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a page and plots")
    parser.add_argument(
        "--jobs",
        type=int,
        default=num_usable_cores(),
        help="number of parallel runs (%(default)s: number of cores)",
    )
    parser.add_argument(
        "--cost",
        default="default",
        metavar="NAME|JSON",
        help=f"prices of a step: {', '.join(COSTS)}, or fields of CostModel as JSON",
    )
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=16_384)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--batch-size", type=int, default=128, help="of static and dynamic batching"
    )
    parser.add_argument("--batch-wait-s", type=float, default=0.5, help="of dynamic batching")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        help="replace a part of the scheduler by a simple variant (plain_variants.py)",
    )
    parser.add_argument("--target-ttft-s", type=float, default=1.0)
    parser.add_argument("--target-itl-ms", type=float, default=100.0)
    parser.add_argument("--tight-itl-ms", type=float, default=40.0)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=2048,
        help="max_tokens of the requests; output lengths are in the trace",
    )
    return parser


def _base(args: argparse.Namespace) -> SimulationConfig:
    return SimulationConfig(
        cost=_cost(args.cost),
        targets=Targets(ttft_s=args.target_ttft_s, itl_s=args.target_itl_ms / 1e3),
        max_num_seqs=args.max_num_seqs,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        batch_size=args.batch_size,
        batch_wait_s=args.batch_wait_s,
        max_tokens=args.max_tokens,
    )


def _cost(text: str) -> CostModel:
    if text in COSTS:
        return COSTS[text]
    try:
        prices: Any = json.loads(text)
        return CostModel(**prices)
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"--cost {text!r} is not {' or '.join(COSTS)}, nor prices: {error}") from (
            error
        )


def _sections(
    bench: Bench, trace: Sequence[TraceRequest], args: argparse.Namespace
) -> list[Section]:
    hours = (trace[-1].arrival_s - trace[0].arrival_s) / 3600.0
    sections: list[Section] = [
        RisingLoad(bench=bench),
        TightItl(bench=bench, itl_s=args.tight_itl_ms / 1e3),
        NoisyNeighbour(bench=bench),
        ServedShares(bench=bench),
        Deadlines(bench=bench),
    ]
    if any(request.prefix_ids for request in trace):
        sections.append(PrefixReuse(bench=bench, trace=trace))
    sections.append(Speed(bench=bench, hours=hours))
    return sections


def _run_sections(
    runs: Sweep, sections: Sequence[Section]
) -> tuple[dict[str, list[dict[str, Any]]], list[Table]]:
    """Run all trials of all sections in parallel; return raw results by section, and their
    tables."""
    trials = [(section, trial) for section in sections for trial in section.trials]
    # The flood takes longest, so it is started first.
    order = sorted(range(len(trials)), key=lambda i: trials[i][0].key != "neighbour")
    done = dict(zip(order, runs.run([trials[i][1] for i in order]), strict=True))
    raw: dict[str, list[dict[str, Any]]] = {}
    tables: list[Table] = []
    for section in sections:
        its = [done[i] for i, (owner, _) in enumerate(trials) if owner is section]
        raw[section.key] = section.raw(its)
        tables.append(section.table(raw[section.key]))
    return raw, tables


def checks_of(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Check]:
    """Return the checks of the figures against their goals."""
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
        at_least("good of penstock over fcfs, load 1.2", _ratio(good, 1.2), 1.3, "times"),
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
    checks += [
        at_least(
            f"hits over Belady's, {row['num_cache_tokens']:,} tokens",
            row["hits"] / row["belady_all"],
            0.95,
            "times",
        )
        for row in results.get("prefix_reuse", ())
    ]
    slowest_s = max(row["cpu_s_per_hour"] for row in results["speed"])
    checks.append(at_most("an hour as recorded, CPU time", slowest_s, 30.0, "s"))
    return checks


def charts_of(rows: Sequence[Mapping[str, Any]], target_ttft_s: float) -> tuple[Chart, ...]:
    """Return charts by load, one line per policy; `rows`: those of the section about rising
    load.
    """
    limit_s = 4.0 * target_ttft_s
    return (
        _chart(rows, "goodput", "Goodput", "good requests/s", "goodput_per_s"),
        _chart(rows, "good_share", "Requests within the targets", "share of all", "good_share"),
        _chart(rows, "ttft_p50", "Median TTFT", "seconds", "ttft", "p50_s", limit_s=limit_s),
        _chart(rows, "ttft_p99", "p99 TTFT", "seconds", "ttft", "p99_s", limit_s=limit_s),
        _chart(rows, "itl_p50", "Median time between tokens", "seconds", "itl", "p50_s"),
        _chart(rows, "itl_p99", "p99 time between tokens", "seconds", "itl", "p99_s"),
        _chart(rows, "throughput", "Throughput", "output tokens/s", "output_tokens_per_s"),
        _chart(rows, "kv_used", "KV blocks in use", "share", "kv_utilisation"),
        _chart(rows, "kv_waste", "Empty KV token slots", "share", "kv_waste"),
        _chart(rows, "prefix_hits", "Prompt tokens from the cache", "share", "prefix_hit_rate"),
    )


def _chart(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    title: str,
    unit: str,
    *path: str,
    limit_s: float = math.inf,
) -> Chart:
    return Chart(
        name=name,
        title=title,
        x_label="load (1: in-flight FCFS serves 90 % well)",
        y_label=unit,
        series=lines(
            rows,
            [one.name for one in CONTENDERS],
            lambda row: row["policy"],
            lambda row: row["load"],
            lambda row: float(reduce(getitem, path, row)),  # type: ignore[arg-type]
        ),
        y_limit=limit_s,
        limit_text="four times the target",
    )


def _ratio(good: Mapping[tuple[str, float], int], load: float) -> float:
    return good["penstock", load] / max(1, good["fcfs", load])


def _kept_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the rate of requests completed in time at the highest load, divided by the maximum of
    that rate over all loads.
    """
    rates = {row["load"]: row["requests_per_s"] for row in rows if row["deadline"] == "whole"}
    return float(rates[max(rates)] / max(rates.values()))


def _good_shares(runs: Sweep, base: SimulationConfig, loads: Sequence[float]) -> list[float]:
    """Return the share of requests that meet their targets with FCFS, at each multiple of the
    trace's load.
    """
    trials = [Bench(base=base).trial(FCFS, load) for load in loads]
    return [result.summary.good_share for result in runs.run(trials)]


def _settings(args: argparse.Namespace, trace: Sequence[TraceRequest], load: float) -> str:
    cost = json.dumps(dataclasses.asdict(_cost(args.cost)))
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    name = "made up" if args.trace is None else args.trace.name
    return (
        f"{name}: {len(trace):,} requests in {span_s:,.0f} s; load 1 is {load:.3f} times"
        f" that, {load * len(trace) / span_s:.2f} requests/s. Prices ({args.cost}): {cost}. At most"
        f" {args.max_num_seqs} requests run, {args.num_blocks:,} blocks of {args.block_size}"
        f" tokens. Static and dynamic batches of {args.batch_size}. Requests ask for"
        f" {args.max_tokens} tokens and get what the trace says."
    )


def _print_progress(done: SweepProgress) -> None:
    result = done.result
    progress(
        f"  [{done.num_done}/{done.num_trials}, {done.wall_s:.0f} s]"
        f" {result.trial.name}: {result.summary.good_share:.1%} good, {result.cpu_s:.1f} s"
    )


if __name__ == "__main__":
    main()
