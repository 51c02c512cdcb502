"""Reports a load test: a table for people, JSON for programs, one HTML page.

Owns the formats. Does not measure; the figures and their meaning are in `figures`.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.client import Model
from penstock.tools.bench.figures import (
    LatencyFigures,
    LoadFigures,
    percentile_curve,
    warnings_of,
)
from penstock.tools.bench.fleet import LoadRun
from penstock.tools.bench.lengths import lengths_text
from penstock.tools.bench.plan import Arrivals, LoadPlan
from penstock.tools.bench.sender import SenderConfig
from penstock.tools.charts import Chart, Series, svg
from penstock.tools.pages import (
    aligned,
    finite_or_none,
    html_table,
    number_text,
    page,
    preformatted,
    seconds_text,
    share_text,
)

_LATENCIES = (
    ("TTFT", "ttft"),
    ("ITL", "itl"),
    ("TPOT", "tpot"),
    ("E2E", "e2e"),
    ("queue", "queue"),
    ("lateness", "lateness"),
)
_MAX_LINES = 8
"""Most curves in one chart: more cannot be distinguished."""
_SWEEP_HEADER = (
    *("load", "offered/s", "done/s", "good/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50"),
    *("ITL p99", "E2E p50", "E2E p99", "failed", "dropped"),
)


def point_text(point: LoadPlan | LoadFigures) -> str:
    """Return a short name for one of several runs."""
    if point.rate_per_s is not None:
        return f"{point.rate_per_s:g}/s"
    if point.concurrency is not None:
        return f"{point.concurrency} at once"
    return Arrivals.REPLAY.value


def _load_text(figures: LoadFigures) -> str:
    """Return the arrival process and the rate; a trace has no rate."""
    return ", ".join(dict.fromkeys((str(figures.arrivals), point_text(figures))))


def figure_lines(figures: LoadFigures) -> list[str]:
    """Format one run as text."""
    f = figures
    outcomes = [f"{f.num_completed:,} completed", f"{f.num_failed:,} failed"]
    outcomes += [f"{f.num_dropped:,} dropped"] if f.num_dropped else []
    outcomes += [f"{f.num_unfinished:,} unfinished"] if f.num_unfinished else []
    heads = " ".join(f"{head:>10}" for head in ("mean", "p50", "p90", "p99", "p99.9", "max"))
    return [
        f"load         {_load_text(f)}, {f.window_s:,.1f} s counted",
        f"requests     {f.num_due:,} due: {', '.join(outcomes)}",
        f"goodput      {number_text(f.goodput_per_s, 2)} requests/s,"
        f" {share_text(f.good_share)} of all within targets",
        f"throughput   {number_text(f.requests_per_s, 2)} requests/s of"
        f" {number_text(f.offered_per_s, 2)} offered,"
        f" {number_text(f.output_tokens_per_s)} output and"
        f" {number_text(f.prompt_tokens_per_s)} prompt tokens/s",
        f"{'':12} {heads}",
        *(_latency_line(name, getattr(f, field)) for name, field in _LATENCIES),
        *(
            f"error        {error.num:,} x {_error_text(error.status, error.reason)}"
            for error in f.errors
        ),
        f"client       {_client_text(f)}",
    ]


def sweep_lines(figures: Sequence[LoadFigures]) -> list[str]:
    """Format several runs as a table, one row each, and list their errors."""
    lines = aligned([_SWEEP_HEADER, *(_sweep_row(one) for one in figures)])
    for one in figures:
        lines += [
            f"error        {point_text(one)}: {error.num:,} x"
            f" {_error_text(error.status, error.reason)}"
            for error in one.errors
        ]
    return lines


def document_of(
    sender: SenderConfig, model: Model, runs: Sequence[LoadRun], figures: Sequence[LoadFigures]
) -> dict[str, Any]:
    """Return settings and figures as JSON values; figures that were not measured are null.

    Durations are seconds, rates per second.
    """
    plan = runs[0].plan
    return {
        "settings": {
            "address": sender.address,
            "multiplex": sender.is_multiplex,
            "num_channels": sender.num_channels,
            "num_processes": len(runs[0].cpu_shares),
            "prompt_tokens": "trace" if plan.rows else lengths_text(plan.prompt_tokens),
            "output_tokens": "trace" if plan.rows else lengths_text(plan.output_tokens),
            "warm_up_s": plan.warm_up_s,
            "duration_s": plan.duration_s,
            "max_requests": plan.max_requests,
            "drain_s": plan.drain_s,
            "max_in_flight": plan.max_in_flight,
            "deadline_s": plan.deadline_s,
            "targets": dataclasses.asdict(plan.targets),
            "tenant": plan.tenant,
            "seed": plan.seed,
        },
        "model": {"name": model.name, "executor": model.executor},
        "points": [
            finite_or_none({**dataclasses.asdict(one), "warnings": warnings_of(one)})
            for one in figures
        ],
    }


def write_page(
    path: Path,
    document: dict[str, Any],
    runs: Sequence[LoadRun],
    figures: Sequence[LoadFigures],
) -> None:
    """Write the page, a single self-contained file. Raises OSError."""
    warnings = [f"{point_text(one)}: {text}" for one in figures for text in warnings_of(one)]
    sections = [preformatted("\n".join(warnings))] if warnings else []
    if len(runs) > 1:
        sections += [
            html_table(_SWEEP_HEADER, [_sweep_row(one) for one in figures]),
            *(svg(chart) for chart in _curves(figures)),
        ]
    sections += [svg(chart) for chart in _percentiles(runs, figures)]
    sections += ["<h2>Errors</h2>", _errors_table(figures)]
    for one in figures:
        lines = preformatted("\n".join(figure_lines(one)))
        sections += [f"<h2>{point_text(one)}</h2>", lines]
    settings = json.dumps({name: document[name] for name in ("settings", "model")}, indent=2)
    sections += ["<h2>Settings</h2>", preformatted(settings)]
    model = document["model"]["name"]
    path.write_text(page(f"Load on {model}", sections), encoding="utf-8")


def _curves(figures: Sequence[LoadFigures]) -> tuple[Chart, ...]:
    """Chart latency over throughput, and completed over offered requests."""
    is_open = figures[0].concurrency is None
    loads = [one.rate_per_s if is_open else one.concurrency for one in figures]
    x_label = "offered requests/s" if is_open else "requests at once"
    return (
        _curve("TTFT over throughput", "ttft", figures),
        _curve("ITL over throughput", "itl", figures),
        _curve("E2E over throughput", "e2e", figures),
        Chart(
            name="throughput",
            title="Requests done, and done within targets",
            x_label=x_label,
            y_label="requests/s",
            series=(
                _series("done", loads, [one.requests_per_s for one in figures]),
                _series("good", loads, [one.goodput_per_s for one in figures]),
            ),
            has_marks=True,
        ),
    )


def _curve(title: str, field: str, figures: Sequence[LoadFigures]) -> Chart:
    latencies: list[LatencyFigures] = [getattr(one, field) for one in figures]
    rates = [one.requests_per_s for one in figures]
    return Chart(
        name=f"{field}_curve",
        title=title,
        x_label=f"requests/s done ({title.partition(' ')[0]})",
        y_label="milliseconds",
        series=(
            _series("p50", rates, [one.p50_s * 1e3 for one in latencies]),
            _series("p90", rates, [one.p90_s * 1e3 for one in latencies]),
            _series("p99", rates, [one.p99_s * 1e3 for one in latencies]),
        ),
        is_log_y=True,
        has_marks=True,
    )


def _percentiles(runs: Sequence[LoadRun], figures: Sequence[LoadFigures]) -> list[Chart]:
    """Chart the percentiles of each kind of latency, for every run (for a sample of many runs)."""
    charts: list[Chart] = []
    step = -(-len(runs) // _MAX_LINES)
    chosen = list(zip(runs, figures, strict=True))[::step]
    for name, field in _LATENCIES:
        series: list[Series] = []
        for run, one in chosen:
            nines, durations_s = percentile_curve(getattr(run.recorder, field))
            durations_ms = [duration_s * 1e3 for duration_s in durations_s]
            series.append(_series(point_text(one), nines, durations_ms))
        charts.append(
            Chart(
                name=f"{field}_percentiles",
                title=f"{name} by percentile",
                x_label=f"{name}: 1 / (1 - share); 10 is p90, 100 is p99, 1000 is p99.9",
                y_label="milliseconds",
                series=tuple(series),
                is_log_x=True,
                is_log_y=True,
            )
        )
    return charts


def _series(name: str, x: Sequence[float | None], y: Sequence[float]) -> Series:
    return Series(name=name, x=np.array(x, dtype=np.float64), y=np.array(y, dtype=np.float64))


def _errors_table(figures: Sequence[LoadFigures]) -> str:
    rows = [
        (point_text(one), error.status, error.reason or "-", f"{error.num:,}")
        for one in figures
        for error in one.errors
    ]
    if not rows:
        return "<p>None.</p>"
    return html_table(("load", "status", "reason", "requests"), rows)


def _sweep_row(figures: LoadFigures) -> tuple[str, ...]:
    f = figures
    return (
        point_text(f),
        number_text(f.offered_per_s, 2),
        number_text(f.requests_per_s, 2),
        number_text(f.goodput_per_s, 2),
        number_text(f.output_tokens_per_s),
        *(
            seconds_text(value)
            for latency in (f.ttft, f.itl, f.e2e)
            for value in (latency.p50_s, latency.p99_s)
        ),
        f"{f.num_failed:,}",
        f"{f.num_dropped:,}",
    )


def _latency_line(name: str, f: LatencyFigures) -> str:
    cells = (f.mean_s, f.p50_s, f.p90_s, f.p99_s, f.p999_s, f.max_s)
    return f"{name:12} " + " ".join(f"{seconds_text(cell):>10}" for cell in cells)


def _error_text(status: str, reason: str) -> str:
    return f"{status} ({reason})" if reason and reason != status else status


def _client_text(figures: LoadFigures) -> str:
    num = len(figures.cpu_shares)
    busiest = share_text(max(figures.cpu_shares, default=0.0), 0)
    return f"{num} process{'es' if num > 1 else ''}, at most {busiest} of a core each"
