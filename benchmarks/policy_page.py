"""The comparison as one page that needs nothing beside itself, and as plots.

Owns the choice of charts and the order of the page.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tools.simulation.chart import Chart, Series, svg
from penstock.tools.simulation.png_plots import has_matplotlib, write_png
from penstock.tools.simulation.report import html_table, page
from policy_bench import CONTENDERS, Table
from report import Check, cell

PAGE_FILE = "policies.html"


def charts_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Chart, ...]:
    """Curves over the load, one line per policy; `rows` as of the part about rising load."""
    return (
        _chart(rows, "goodput", "Goodput", "good requests/s", "goodput_per_s"),
        _chart(rows, "good_share", "Requests within the targets", "share of all", "good_share"),
        _chart(rows, "ttft_p50", "Median time to first token", "seconds", "ttft", "p50_s"),
        _chart(rows, "ttft_p99", "p99 time to first token", "seconds", "ttft", "p99_s"),
        _chart(rows, "itl_p50", "Median time between tokens", "seconds", "itl", "p50_s"),
        _chart(rows, "itl_p99", "p99 time between tokens", "seconds", "itl", "p99_s"),
        _chart(rows, "throughput", "Throughput", "output tokens/s", "output_tokens_per_s"),
        _chart(rows, "kv_used", "KV blocks in use", "share", "kv_utilisation"),
        _chart(rows, "kv_waste", "KV places that hold nothing", "share", "kv_waste"),
        _chart(rows, "prefix_hits", "Prompt tokens from the cache", "share", "prefix_hit_rate"),
    )


def write_page(
    folder: Path,
    charts: tuple[Chart, ...],
    tables: Sequence[Table],
    checks: Sequence[Check],
    settings: str,
) -> None:
    """Write the page and, where matplotlib is installed, the plots. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [f"<p>{settings}</p>", "<h2>Goals</h2>", html_table(*_check_cells(checks))]
    for number, table in enumerate(tables):
        rows = [[cell(value) for value in row] for row in table.rows]
        sections += [
            f"<h2>{table.title}</h2>",
            f"<p>{table.note}</p>",
            html_table(table.header, rows),
        ]
        if not number:
            sections += [svg(chart) for chart in charts]
    text = page("Scheduling policies compared", sections)
    (folder / PAGE_FILE).write_text(text, encoding="utf-8")
    if has_matplotlib():
        write_png(charts, folder)


def _check_cells(checks: Sequence[Check]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = [
        [c.name, cell(c.value), f"{c.sense} {cell(c.goal)}", c.unit, "yes" if c.holds else "NO"]
        for c in checks
    ]
    return ("figure", "measured", "goal", "unit", "holds"), rows


def _chart(
    rows: Sequence[Mapping[str, Any]], name: str, title: str, unit: str, *path: str
) -> Chart:
    series: list[Series] = []
    for contender in CONTENDERS:
        its = [row for row in rows if row["policy"] == contender.name]
        x = np.array([row["load"] for row in its], dtype=np.float64)
        y = np.array([_at(row, path) for row in its], dtype=np.float64)
        series.append(Series(name=contender.name, x=x, y=y))
    return Chart(
        name=name,
        title=title,
        x_label="load (1: in-flight FCFS serves 90 % well)",
        y_label=unit,
        series=tuple(series),
        is_log_y=name in {"ttft_p50", "ttft_p99"},
    )


def _at(row: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = row
    for name in path:
        value = value[name]
    return float(value)
