"""Reports a load test as a text table, as JSON and as one HTML page.

`figures` defines and computes the figures.
"""

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.client import Model
from penstock.tools.bench.figures import (
    LatencyFigures,
    LoadFigures,
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
    ("total", "total"),
    ("queue", "queue"),
    ("lateness", "lateness"),
)
_MAX_LINES = 8
"""Maximum number of curves in a chart; more could not be distinguished."""
_SWEEP_HEADER = (
    *("load", "offered/s", "done/s", "good/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50"),
    *("ITL p99", "total p50", "total p99", "failed", "dropped"),
)
_PAGE_ONLY = frozenset({"offered/s", "total p50", "dropped"})
"""Columns that the table on a terminal does not have, to fit 100 characters."""


def point_text(point: LoadPlan | LoadFigures) -> str:
    """Return a short name of a run: its rate, its concurrency, or "replay"."""
    if point.rate_per_s is not None:
        return f"{point.rate_per_s:g}/s"
    if point.concurrency is not None:
        return f"{point.concurrency} concurrent"
    return Arrivals.REPLAY.value


def _load_text(figures: LoadFigures) -> str:
    """Return the arrival process and, except for a replay, the rate or concurrency."""
    return ", ".join(dict.fromkeys((str(figures.arrivals), point_text(figures))))


def figure_lines(figures: LoadFigures) -> list[str]:
    """Format the figures of one run as lines of text."""
    f = figures
    outcomes = [f"{f.num_completed:,} completed", f"{f.num_failed:,} failed"]
    outcomes += [f"{f.num_dropped:,} dropped"] if f.num_dropped else []
    outcomes += [f"{f.num_unfinished:,} unfinished"] if f.num_unfinished else []
    heads = " ".join(f"{head:>10}" for head in ("mean", "p50", "p90", "p99", "p99.9", "max"))
    return [
        f"load         {_load_text(f)}, {f.sending_s:,.1f} s of sending and"
        f" {f.duration_s - f.sending_s:,.1f} s of draining",
        f"requests     {f.num_due:,} due: {', '.join(outcomes)}",
        f"goodput      {number_text(f.goodput_per_s, 2)} requests/s,"
        f" {share_text(f.good_share)} of all within targets",
        f"throughput   {number_text(f.requests_per_s, 2)} requests/s{_offered_text(f)},"
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


def _offered_text(figures: LoadFigures) -> str:
    if figures.concurrency is not None:
        return ""
    return f" of {number_text(figures.offered_per_s, 2)} offered"


def sweep_lines(figures: Sequence[LoadFigures]) -> list[str]:
    """Format several runs as a table with the main figures, one row each, and list their errors."""
    header, rows = _sweep_table(figures, _PAGE_ONLY)
    lines = aligned([header, *rows])
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
    """Return the settings, the model and the figures of all runs as JSON values; figures that were
    not measured are None.

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
    """Write the HTML page, a self-contained file. `document`: the result of `document_of`.
    Raises OSError.
    """
    warnings = [f"{point_text(one)}: {text}" for one in figures for text in warnings_of(one)]
    sections = [preformatted("\n".join(warnings))] if warnings else []
    whole = [preformatted("\n".join(figure_lines(one))) for one in figures]
    if len(runs) > 1:
        sections += [
            html_table(*_sweep_table(figures)),
            *(svg(chart) for chart in _curves(figures)),
        ]
    else:
        sections += whole
    sections += [svg(chart) for chart in _percentiles(runs, figures)]
    sections += ["<h2>Errors</h2>", _errors_table(figures)]
    if len(runs) > 1:
        for one, lines in zip(figures, whole, strict=True):
            sections += [f"<h2>{point_text(one)}</h2>", lines]
    settings = json.dumps({name: document[name] for name in ("settings", "model")}, indent=2)
    sections += ["<h2>Settings</h2>", preformatted(settings)]
    model = document["model"]["name"]
    path.write_text(page(f"Load on {model}", sections), encoding="utf-8")


def _curves(figures: Sequence[LoadFigures]) -> tuple[Chart, ...]:
    """Return charts of latencies, and of the rates of completed and good requests, by the load of
    the run.
    """
    return (
        _curve("TTFT by load", "ttft", figures),
        _curve("ITL by load", "itl", figures),
        _curve("Total by load", "total", figures),
        Chart(
            name="throughput",
            title="Requests done, and done within targets, by load",
            x_label=_load_label(figures),
            y_label="requests/s",
            series=(
                _series("done", _loads(figures), [one.requests_per_s for one in figures]),
                _series("good", _loads(figures), [one.goodput_per_s for one in figures]),
            ),
            has_marks=True,
        ),
    )


def _loads(figures: Sequence[LoadFigures]) -> list[float | None]:
    return [one.concurrency if one.rate_per_s is None else one.rate_per_s for one in figures]


def _load_label(figures: Sequence[LoadFigures]) -> str:
    return "concurrent requests" if figures[0].rate_per_s is None else "offered requests/s"


def _curve(title: str, field: str, figures: Sequence[LoadFigures]) -> Chart:
    latencies: list[LatencyFigures] = [getattr(one, field) for one in figures]
    loads = _loads(figures)
    limit_ms, limit_text = _limit(field, figures)
    return Chart(
        name=f"{field}_curve",
        title=title,
        x_label=_load_label(figures),
        y_label="milliseconds",
        series=(
            _series("p50", loads, [one.p50_s * 1e3 for one in latencies]),
            _series("p90", loads, [one.p90_s * 1e3 for one in latencies]),
            _series("p99", loads, [one.p99_s * 1e3 for one in latencies]),
        ),
        has_marks=True,
        y_limit=limit_ms,
        limit_text=limit_text,
    )


def _percentiles(runs: Sequence[LoadRun], figures: Sequence[LoadFigures]) -> list[Chart]:
    """Return one chart of percentiles per kind of latency, with one line per run. If there are more
    than 8 runs, only every n-th run has a line.
    """
    charts: list[Chart] = []
    step = -(-len(runs) // _MAX_LINES)
    chosen = list(zip(runs, figures, strict=True))[::step]
    for name, field in _LATENCIES:
        series: list[Series] = []
        for run, one in chosen:
            durations_ms = [s * 1e3 for s in getattr(run.recorder, field).percentiles_s()]
            series.append(_series(point_text(one), range(len(durations_ms)), durations_ms))
        limit_ms, limit_text = _limit(field, figures)
        charts.append(
            Chart(
                name=f"{field}_percentiles",
                title=f"{name} by percentile",
                x_label="percentile",
                y_label="milliseconds",
                series=tuple(series),
                y_limit=limit_ms,
                limit_text=limit_text,
            )
        )
    return charts


def _limit(field: str, figures: Sequence[LoadFigures]) -> tuple[float, str]:
    """Return the upper limit of a latency axis, in milliseconds, and a text that explains it.

    The limit is twice the p99 of the run with the most goodput.
    Without a limit, latencies under overload would flatten all other lines.
    """
    best = max(figures, key=lambda one: one.goodput_per_s)
    at = f" at {point_text(best)}, which has the most goodput" if len(figures) > 1 else ""
    return 2e3 * getattr(best, field).p99_s, f"twice the p99{at}"


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


def _sweep_table(
    figures: Sequence[LoadFigures], left_out: Collection[str] = ()
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and one row per run, without the columns named in `left_out`; for a closed
    loop, also without the offered rate, because it has none.
    """
    if figures[0].concurrency is not None:
        left_out = {*left_out, "offered/s"}
    columns = [index for index, name in enumerate(_SWEEP_HEADER) if name not in left_out]
    rows = [_SWEEP_HEADER, *map(_sweep_row, figures)]
    header, *shown = [tuple(row[column] for column in columns) for row in rows]
    return header, shown


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
            for latency in (f.ttft, f.itl, f.total)
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
