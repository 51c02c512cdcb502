"""The delivery benchmark as one page that needs nothing beside itself.

Owns the choice of charts: processor time per token and p99 delay over the number of streams, a
line for each side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from delivery_cells import SIDES, Seen
from penstock.tools.simulation.chart import Chart, Series, svg
from penstock.tools.simulation.report import html_table, page
from report import Check, cell, verdict

PAGE_FILE = "delivery.html"


def write_page(
    folder: Path,
    seen: Sequence[Seen],
    table: tuple[Sequence[str], Sequence[Sequence[object]]],
    checks: Sequence[Check],
) -> None:
    """Write the page. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    goals = [
        [c.name, cell(c.value), f"{c.sense} {cell(c.goal)}", c.unit, verdict(c)] for c in checks
    ]
    header, rows = table
    sections = [
        "<h2>Goals</h2>",
        html_table(("figure", "measured", "goal", "unit", "holds"), goals),
        *(svg(chart) for chart in charts_of(seen)),
        "<h2>Medians</h2>",
        html_table(header, [[cell(value) for value in row] for row in rows]),
    ]
    text = page("Delivery side by side", sections)
    (folder / PAGE_FILE).write_text(text, encoding="utf-8")
    print(f"\nwritten: {folder / PAGE_FILE}")


def charts_of(seen: Sequence[Seen]) -> list[Chart]:
    """Two charts for each step time that was measured with more than one number of streams."""
    charts: list[Chart] = []
    for step_ms in sorted({each.cell.step_ms for each in seen}, reverse=True):
        its = [each for each in seen if each.cell.step_ms == step_ms]
        if len({each.cell.num_streams for each in its}) < 2:
            continue
        title = f"steps of {step_ms:g} ms"
        charts += [
            _chart(its, f"cpu_{step_ms:g}", f"Server CPU, {title}", "us per token", _server_us),
            _chart(its, f"p99_{step_ms:g}", f"p99 delay, {title}", "ms", _p99_ms),
        ]
    return charts


def _server_us(seen: Seen) -> float:
    return seen.server_us


def _p99_ms(seen: Seen) -> float:
    return seen.delay_p99_ms


def _chart(
    seen: Sequence[Seen], name: str, title: str, unit: str, value: Callable[[Seen], float]
) -> Chart:
    series: list[Series] = []
    for side in SIDES:
        points: dict[int, list[float]] = {}
        for each in seen:
            if each.cell.side == side:
                points.setdefault(each.cell.num_streams, []).append(value(each))
        if points:
            x = sorted(points)
            y = [statistics.median(points[num_streams]) for num_streams in x]
            series.append(
                Series(name=side, x=np.array(x, dtype=np.float64), y=np.array(y, dtype=np.float64))
            )
    return Chart(
        name=name,
        title=title,
        x_label="streams",
        y_label=unit,
        series=tuple(series),
        is_log_x=True,
        is_log_y=True,
        has_marks=True,
    )
