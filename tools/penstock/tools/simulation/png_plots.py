"""Charts as PNG files, by matplotlib, which is imported only when one is drawn.

Owns the drawing and the error for a missing matplotlib.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.tools.simulation.chart import Chart, axis_label


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message has the command to install it."""


def has_matplotlib() -> bool:
    """Whether PNG files can be drawn."""
    return find_spec("matplotlib") is not None


def write_png(charts: tuple[Chart, ...], folder: Path) -> list[Path]:
    """Draw each chart as `<name>.png`; the files. Raises PlotsUnavailable."""
    if not has_matplotlib():
        raise PlotsUnavailable("PNG plots need matplotlib: install penstock[plots]")
    # Its own classes, not pyplot: no state of the process is touched and no display is looked for.
    figures: Any = import_module("matplotlib.figure")

    paths: list[Path] = []
    for chart in charts:
        figure = figures.Figure(figsize=(8.0, 4.0), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for series in chart.series:
            x, y = chart.points(series)
            axes.plot(x, y, label=series.name)
        axes.set(
            title=chart.title,
            xlabel=axis_label(chart.x_label, chart.is_log_x),
            ylabel=axis_label(chart.y_label, chart.is_log_y),
        )
        if chart.is_log_x:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0.0)
        if chart.is_log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0.0)
        axes.grid(visible=True, alpha=0.4)
        if len(chart.series) > 1:
            axes.legend()
        path = folder / f"{chart.name}.png"
        figure.savefig(path)
        paths.append(path)
    return paths
