"""Reports a run of one server as text, as JSON, as CSV and as one HTML page."""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.settings.json_values import to_json_value
from penstock.tools.charts import Chart, Series, svg
from penstock.tools.pages import (
    finite_or_none,
    number_text,
    page,
    preformatted,
    seconds_text,
    share_text,
)
from penstock.tools.simulation.simulate import SimulationRun
from penstock.tools.simulation.summary import Durations, Summary

SUMMARY_FILE = "summary.json"
REQUESTS_FILE = "requests.csv"
PAGE_FILE = "report.html"

_FLOATS = ("arrival_s", "admitted_s", "first_token_s", "last_token_s", "end_s", "max_gap_s")
_INTS = (
    "priority",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_prefill_tokens",
    "num_output_tokens",
    "num_slow_gaps",
    "num_preemptions",
)


def write_report(run: SimulationRun, summary: Summary, folder: Path) -> None:
    """Write `summary.json`, `requests.csv` and `report.html`.

    Creates the folder if it is missing. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text(summary_json(run, summary) + "\n", encoding="utf-8")
    write_requests(run, folder / REQUESTS_FILE)
    sections = [
        preformatted("\n".join(summary_lines(summary))),
        *map(svg, charts_of(run)),
        "<h2>Settings</h2>",
        preformatted(json.dumps(settings_of(run), indent=2)),
    ]
    title = f"Simulated: {run.config.policy}"
    (folder / PAGE_FILE).write_text(page(title, sections), encoding="utf-8")


def summary_json(run: SimulationRun, summary: Summary) -> str:
    """Format settings and figures as JSON; figures that were not measured are null."""
    document = {
        "settings": settings_of(run),
        "figures": finite_or_none(dataclasses.asdict(summary)),
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def settings_of(run: SimulationRun) -> dict[str, Any]:
    """Return the settings of a run as JSON values."""
    config = run.config
    values: dict[str, Any] = {
        field.name: to_json_value(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name != "scheduler"
    }
    scheduler = {
        field.name: getattr(config.scheduler, field.name)
        for field in dataclasses.fields(config.scheduler)
        # The policy determines the order.
        if field.name != "order"
    }
    values["scheduler"] = {
        name: finite_or_none(dict(value) if name == "tenant_weights" else to_json_value(value))
        for name, value in scheduler.items()
    }
    return values


def summary_lines(summary: Summary) -> list[str]:
    """Format the figures of a run as lines of text."""
    s = summary
    outcomes = ", ".join(f"{name} {num:,}" for name, num in s.outcomes.items())
    lines = [
        f"requests     {s.num_requests:,} in {s.duration_s:,.1f} s: {outcomes}",
        f"goodput      {number_text(s.goodput_per_s, 3)} requests/s,"
        f" {share_text(s.good_share)} of all within targets",
        f"throughput   {number_text(s.requests_per_s, 3)} requests/s,"
        f" {number_text(s.output_tokens_per_s)} output and"
        f" {number_text(s.prompt_tokens_per_s)} prompt tokens/s",
        f"{'':12} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
        _durations_line("TTFT", s.ttft),
        _durations_line("ITL", s.itl),
        _durations_line("total", s.total),
        _durations_line("queue", s.queue),
        f"KV cache     {share_text(s.kv_utilisation)} used (at most"
        f" {share_text(s.kv_utilisation_max)}), {share_text(s.kv_waste, 2)} of that empty",
        f"prefix hits  {share_text(s.prefix_hit_rate)} of prompt tokens",
        f"lost work    {s.num_preemptions:,} preemptions, {share_text(s.prefill_waste, 2)} of"
        " prefill for"
        " requests that then expired",
    ]
    if s.served_ratio is not None:
        lines.append(f"fairness     {s.served_ratio:.2f} (most over least served, 1 is even)")
    if len(s.tenants) > 1:
        lines += [
            f"tenant       {tenant.tenant}: {tenant.num_requests:,} requests,"
            f" {tenant.num_served_tokens:,} tokens, {share_text(tenant.good_share)} good,"
            f" TTFT p50 {seconds_text(tenant.ttft.p50_s)}, p99 {seconds_text(tenant.ttft.p99_s)}"
            for tenant in s.tenants
        ]
    return lines


def _durations_line(name: str, values: Durations) -> str:
    cells = (values.mean_s, values.p50_s, values.p90_s, values.p99_s, values.max_s)
    return f"{name:12} " + " ".join(f"{seconds_text(cell):>10}" for cell in cells)


def write_requests(run: SimulationRun, path: Path, replica_of: Sequence[int] | None = None) -> None:
    """Write a CSV file with one row per request; unknown values are empty cells.

    `replica_of`: the index of each request's replica, for an additional last column; None: no such
    column.
    """
    table = run.recorder.table
    floats = [table.seconds(name).tolist() for name in _FLOATS]
    ints = [table.counts(name).tolist() for name in _INTS]
    tenants = [table.tenants[int(index)] for index in table.counts("tenant")]
    outcomes = [table.outcomes[int(index)] for index in table.counts("outcome")]
    last = () if replica_of is None else ("replica",)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("request", "tenant", "outcome", *_INTS, *_FLOATS, *last))
        for row in range(len(table)):
            known = ("" if math.isnan(column[row]) else f"{column[row]:.6f}" for column in floats)
            counts = (column[row] for column in ints)
            place = () if replica_of is None else (replica_of[row],)
            writer.writerow((row, tenants[row], outcomes[row], *counts, *known, *place))


def charts_of(run: SimulationRun) -> tuple[Chart, ...]:
    """Return the charts of a run: latencies by percentile; numbers of requests, KV cache use and
    output tokens per tenant over time.
    """
    table, samples = run.recorder.table, run.recorder.samples
    arrival_s = table.seconds("arrival_s")
    ttft = _percentiles("TTFT", table.seconds("first_token_s") - arrival_s + run.config.front_s)
    queue = _percentiles("queue", table.seconds("admitted_s") - arrival_s)
    gaps = run.recorder.gaps
    gaps_s, gap_shares = gaps.cumulative()
    at_s = np.array(samples.at_s, dtype=np.float64)
    used = np.array(samples.num_used_blocks, dtype=np.float64)
    return (
        Chart(
            name="ttft",
            title="TTFT and queue time by percentile",
            x_label="percentile of requests",
            y_label="milliseconds",
            series=(ttft, queue),
            y_limit=2.0 * float(np.interp(99.0, ttft.x, ttft.y)) if len(ttft.x) else math.nan,
            limit_text="twice the p99 of TTFT",
        ),
        Chart(
            name="itl",
            title="ITL by percentile",
            x_label="percentile of gaps",
            y_label="milliseconds",
            series=(Series(name="ITL", x=gap_shares * 1e2, y=gaps_s * 1e3),),
            y_limit=2e3 * gaps.percentile_s(99.0),
            limit_text="twice the p99",
        ),
        Chart(
            name="load",
            title="Requests",
            x_label="virtual seconds",
            y_label="requests",
            series=(
                Series(name="running", x=at_s, y=np.array(samples.num_running, np.float64)),
                Series(name="waiting", x=at_s, y=np.array(samples.num_waiting, np.float64)),
            ),
        ),
        Chart(
            name="memory",
            title="KV blocks in use",
            x_label="virtual seconds",
            y_label="share of blocks",
            series=(Series(name="used", x=at_s, y=used / run.config.num_blocks),),
        ),
        _tenants(run),
    )


def _tenants(run: SimulationRun) -> Chart:
    recorder = run.recorder
    served = recorder.served_tokens() / recorder.timeline_bin_s
    middles_s: NDArray[np.float64] = np.arange(len(served), dtype=np.float64)
    middles_s = (middles_s + np.float64(0.5)) * np.float64(recorder.timeline_bin_s)
    return Chart(
        name="tenants",
        title="Output tokens served",
        x_label="virtual seconds",
        y_label="tokens/s",
        series=tuple(
            Series(name=tenant or "all requests", x=middles_s, y=served[:, index])
            for index, tenant in enumerate(recorder.table.tenants)
        ),
    )


def _percentiles(name: str, values_s: NDArray[np.float64]) -> Series:
    known = np.sort(values_s[~np.isnan(values_s)])
    return Series(
        name=name, x=np.arange(1, len(known) + 1) * 1e2 / max(1, len(known)), y=known * 1e3
    )
