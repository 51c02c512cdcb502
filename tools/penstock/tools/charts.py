"""Line charts as values, as SVG text that needs no network and no library, and as PNG files.

Owns the value and its drawing. Does not know what is plotted.
"""

import math
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_MAX_POINTS = 600
# Distinguishable in print and by most people who do not see all colours (after Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One line: `x` and `y` float64 [n], x in order. Values that are not finite are omitted."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """Lines over common axes. `name`: of its file. `is_log_x`, `is_log_y`: only positive values are
    drawn. `has_marks`: each point is marked, for lines with few measured points.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False
    is_log_y: bool = False
    has_marks: bool = False

    def points(self, series: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the points of a line to draw: finite ones, thinned to a few hundred."""
        is_drawn = np.isfinite(series.x) & np.isfinite(series.y)
        if self.is_log_x:
            is_drawn &= series.x > 0.0
        if self.is_log_y:
            is_drawn &= series.y > 0.0
        x, y = series.x[is_drawn], series.y[is_drawn]
        if len(x) <= _MAX_POINTS:
            return x, y
        chosen = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS).astype(np.int64))
        return x[chosen], y[chosen]


def axis_label(label: str, is_log: bool) -> str:
    """Return the label, with "(log)" for a logarithmic axis, which need not begin at 0."""
    return f"{label} (log)" if is_log else label


def svg(chart: Chart) -> str:
    """Return the chart as one <svg> element."""
    drawn = [(series, *chart.points(series)) for series in chart.series]
    xs = np.concatenate([x for _, x, _ in drawn]) if drawn else np.zeros(0)
    ys = np.concatenate([y for _, _, y in drawn]) if drawn else np.zeros(0)
    x_axis = _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, is_log=chart.is_log_x)
    y_axis = _Axis.over(ys, _HEIGHT - _BOTTOM, _TOP, is_log=chart.is_log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="sans-serif"'
        ' font-size="11">',
        f"<title>{escape(chart.title)}</title>",
        *_grid(x_axis, y_axis),
        _text(_WIDTH / 2, _HEIGHT - 6, axis_label(chart.x_label, chart.is_log_x), "middle"),
        _text(_LEFT - 52, 14, axis_label(chart.y_label, chart.is_log_y), "start"),
    ]
    for number, (_, x, y) in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        places = list(zip(x_axis.places(x).tolist(), y_axis.places(y).tolist(), strict=True))
        path = " ".join(f"{at_x:.1f},{at_y:.1f}" for at_x, at_y in places)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>'
        )
        if chart.has_marks:
            parts += [
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{colour}"/>'
                for at_x, at_y in places
            ]
    parts += _legend([series.name for series in chart.series])
    parts.append("</svg>")
    return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Values `low` .. `high` on pixels `start` .. `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def over(
        cls, values: NDArray[np.float64], start: float, end: float, *, is_log: bool
    ) -> "_Axis":
        """Return an axis that includes all values, and 0 if it is linear."""
        if not len(values):
            return cls(low=0.0, high=1.0, start=start, end=end, is_log=False)
        low, high = float(values.min()), float(values.max())
        low = low if is_log else min(0.0, low)
        if not high > low:
            high = low * 2.0 if low > 0.0 else low + 1.0
        return cls(low=low, high=high, start=start, end=end, is_log=is_log)

    def places(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert values to pixels."""
        if self.is_log:
            share = np.log(values / self.low) / math.log(self.high / self.low)
        else:
            share = (values - self.low) / (self.high - self.low)
        pixels: NDArray[np.float64] = self.start + share * (self.end - self.start)
        return pixels

    def ticks(self) -> list[float]:
        """Return round values within the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
            ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        else:
            raw = (self.high - self.low) / 5.0
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= raw)
            first = math.ceil(self.low / step)
            ticks = [number * step for number in range(first, first + 8)]
        return [tick for tick in ticks if self.low <= tick <= self.high * (1.0 + 1e-12)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts: list[str] = []
    for tick in x_axis.ticks():
        x = float(x_axis.places(np.array([tick]))[0])
        parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, f"{tick:g}", "middle"))
    for tick in y_axis.ticks():
        y = float(y_axis.places(np.array([tick]))[0])
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    return parts


def _legend(names: list[str]) -> list[str]:
    parts: list[str] = []
    x = _LEFT + 70.0
    for number, name in enumerate(names):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<rect x="{x:.0f}" y="8" width="12" height="4" fill="{colour}"/>'
            + _text(x + 16, 14, name, "start")
        )
        x += 30 + 6.5 * len(name)
    return parts


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message has the command to install it."""


def has_matplotlib() -> bool:
    """Return whether PNG files can be drawn."""
    return find_spec("matplotlib") is not None


def write_png(charts: tuple[Chart, ...], folder: Path) -> list[Path]:
    """Draw each chart as `<name>.png`; return the files. Raises PlotsUnavailable."""
    if not has_matplotlib():
        raise PlotsUnavailable("PNG plots need matplotlib: install penstock[plots]")
    # Without pyplot, which changes state of the process and looks for a display.
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
