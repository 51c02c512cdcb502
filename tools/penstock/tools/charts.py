"""Line charts, rendered as SVG elements or as PNG files."""

import math
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 54, 44
_TITLE_Y, _LEGEND_Y = 14, 34
_MAX_POINTS = 600
_CHAR_WIDTH = 6.2
_LINE_HEIGHT = 13.0
_TRIANGLE, _INFINITY = "\u25b2", "\u221e"
# Distinguishable in print and with most forms of colour blindness (after Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One line of a chart: `x` and `y` float64 [n], in order of x. Points that are not finite are
    omitted, but an infinite y is marked at the top if the chart has a limit.

    `is_reference`: a target or a bound instead of a measurement; drawn dashed.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    is_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chart:
    """Lines over common linear axes that include 0. `name`: the name of its file, without suffix.
    `has_marks`: each point is marked, for lines with few measured points.

    `y_limit`: where the y axis ends if a value exceeds it; values above it are marked by triangles
    at the top, labelled with the values. There is no limit if it is not positive, NaN or infinite.
    `limit_text`: a description of the limit, e.g. "twice the target".
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    has_marks: bool = False
    y_limit: float = math.inf
    limit_text: str = ""

    @property
    def limit(self) -> float:
        """The effective limit of the y axis; infinite if there is none, or no value exceeds it."""
        is_exceeded = any(bool(np.any(series.y > self.y_limit)) for series in self.series)
        return self.y_limit if self.y_limit > 0.0 and is_exceeded else math.inf

    @property
    def note(self) -> str:
        """An explanation of the triangles at the top; empty if no value is above the limit."""
        return f"{_TRIANGLE} over {self.limit_text}" if self.limit < math.inf else ""

    def points(self, series: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the x and y values to draw, float64 [m]: the finite points, evenly sampled if
        there are more than 600.
        """
        is_drawn = np.isfinite(series.x) & np.isfinite(series.y)
        x, y = series.x[is_drawn], series.y[is_drawn]
        if len(x) <= _MAX_POINTS:
            return x, y
        chosen = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS).astype(np.int64))
        return x[chosen], y[chosen]

    def beyond(self, series: Series) -> list[tuple[float, str]]:
        """Return the x values and label texts for values above the limit.

        With `has_marks`, one label for each such value; otherwise a single one, at the first such
        value, with the maximum of the line.
        """
        is_beyond = np.isfinite(series.x) & (series.y > self.limit)
        places, values = series.x[is_beyond].tolist(), series.y[is_beyond].tolist()
        if self.has_marks or not places:
            return [(x, _value_text(y)) for x, y in zip(places, values, strict=True)]
        return [(places[0], f"to {_value_text(max(values))}")]


def svg(chart: Chart) -> str:
    """Return the chart as one <svg> element."""
    drawn = [(series, *chart.points(series)) for series in chart.series]
    xs = np.concatenate([series.x for series in chart.series]) if drawn else np.zeros(0)
    ys = np.concatenate([y for _, _, y in drawn]) if drawn else np.zeros(0)
    x_axis = _Axis.spanning(xs[np.isfinite(xs)], _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis.spanning(np.minimum(ys, chart.limit), _HEIGHT - _BOTTOM, _TOP)
    lines: list[str] = []
    marks: list[str] = []
    labels = _Labels()
    for number, (series, x, y) in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        places = list(zip(x_axis.positions(x).tolist(), y_axis.positions(y).tolist(), strict=True))
        path = " ".join(f"{at_x:.1f},{at_y:.1f}" for at_x, at_y in places)
        dashes = ' stroke-dasharray="6 4"' if series.is_reference else ""
        lines.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6"{dashes} points="{path}"/>'
        )
        if chart.has_marks and not series.is_reference:
            marks += [
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{colour}"/>'
                for (at_x, at_y), value in zip(places, y.tolist(), strict=True)
                if value <= chart.limit
            ]
        for at, text in chart.beyond(series):
            labels.add(float(x_axis.positions(np.array([at]))[0]), text, colour)
    # Covers the parts of lines above the limit.
    box = f'x="{_LEFT}" width="{_WIDTH - _LEFT}" height="{_TOP - 1}"'
    cover = f'<rect {box} fill="#fff"/>' if chart.note else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
            f' width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="sans-serif"'
            ' font-size="11">',
            f"<title>{escape(chart.title)}</title>",
            *_grid(x_axis, y_axis),
            *lines,
            cover,
            f'<g font-size="13" font-weight="bold">{_text(8, _TITLE_Y, chart.title, "start")}</g>',
            _text(_WIDTH - _RIGHT, _TITLE_Y, chart.note, "end"),
            _text(8, _LEGEND_Y, chart.y_label, "start"),
            *_legend(
                [series.name for series in chart.series], 28 + _CHAR_WIDTH * len(chart.y_label)
            ),
            _text(_WIDTH / 2, _HEIGHT - 6, chart.x_label, "middle"),
            *marks,
            *labels.parts,
            "</svg>",
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Maps the values `low` .. `high` to the pixels `start` .. `end`. `is_whole`: ticks are whole
    numbers, because all values are.
    """

    low: float
    high: float
    start: float
    end: float
    is_whole: bool

    @classmethod
    def spanning(cls, values: NDArray[np.float64], start: float, end: float) -> "_Axis":
        """Return an axis that includes all values and 0."""
        low = min(0.0, float(values.min(initial=0.0)))
        high = float(values.max(initial=0.0))
        if not high > low:
            high = low + 1.0
        # Values up to 1 may all be whole although they are shares.
        is_whole = high > 1.0 and bool(np.all(values == np.round(values)))
        return cls(low=low, high=high, start=start, end=end, is_whole=is_whole)

    def positions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the pixel position of each value, float64 [n]."""
        share = (values - self.low) / (self.high - self.low)
        pixels: NDArray[np.float64] = self.start + share * (self.end - self.start)
        return pixels

    def ticks(self) -> list[float]:
        """Return the values of the ticks: at most 8 round numbers within the axis."""
        raw = (self.high - self.low) / 5.0
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= raw)
        step = max(step, 1.0) if self.is_whole else step
        first = math.ceil(self.low / step)
        ticks = [number * step for number in range(first, first + 8)]
        return [tick for tick in ticks if self.low <= tick <= self.high * (1.0 + 1e-12)]


class _Labels:
    """The labels of values above the limit, as SVG elements in `parts`; at the top of the plot, one
    below the other if they would overlap.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._taken: list[tuple[float, float, float]] = []

    def add(self, x: float, text: str, colour: str) -> None:
        """Add a triangle at pixel `x` with the text next to it."""
        width = 14 + _CHAR_WIDTH * len(text)
        is_left = x + width > _WIDTH
        left = x - width if is_left else x - 5
        y = _TOP + 2.0
        while any(
            y == row and left < end and begin < left + width for row, begin, end in self._taken
        ):
            y += _LINE_HEIGHT
        self._taken.append((y, left, left + width))
        triangle = f"{x:.1f},{y:.1f} {x - 4:.1f},{y + 8:.1f} {x + 4:.1f},{y + 8:.1f}"
        at, anchor = (x - 7, "end") if is_left else (x + 7, "start")
        self.parts.append(
            f'<polygon points="{triangle}" fill="{colour}"/>'
            f'<text x="{at:.1f}" y="{y + 9:.1f}" text-anchor="{anchor}" stroke="#fff"'
            f' stroke-width="3" paint-order="stroke">{escape(text)}</text>'
        )


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts: list[str] = []
    for tick in x_axis.ticks():
        x = float(x_axis.positions(np.array([tick]))[0])
        parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, f"{tick:,.12g}", "middle"))
    for tick in y_axis.ticks():
        y = float(y_axis.positions(np.array([tick]))[0])
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:,.12g}", "end"))
    return parts


def _legend(names: list[str], x: float) -> list[str]:
    """Return the legend's SVG elements, beginning at pixel `x`; names that do not fit are replaced
    by the text "and N more".
    """
    parts: list[str] = []
    for number, name in enumerate(names):
        width = 30 + _CHAR_WIDTH * len(name)
        rest = f"and {len(names) - number} more"
        if x + width + (0 if number == len(names) - 1 else _CHAR_WIDTH * len(rest)) > _WIDTH:
            return [*parts, _text(x, _LEGEND_Y, rest, "start")]
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<rect x="{x:.0f}" y="{_LEGEND_Y - 6}" width="12" height="4" fill="{colour}"/>'
            + _text(x + 16, _LEGEND_Y, name, "start")
        )
        x += width
    return parts


def _value_text(value: float) -> str:
    if value == math.inf:
        return _INFINITY
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


class PlotsUnavailable(Exception):
    """matplotlib is not installed; the message contains the command to install it."""


def has_matplotlib() -> bool:
    """Return whether PNG files can be drawn."""
    return find_spec("matplotlib") is not None


def write_png(charts: tuple[Chart, ...], folder: Path) -> list[Path]:
    """Draw each chart as `<name>.png` in `folder`; return the paths. Raises PlotsUnavailable,
    OSError.
    """
    if not has_matplotlib():
        raise PlotsUnavailable("PNG plots need matplotlib: pip install 'penstock[tools]'")
    # Without pyplot, which changes global state and requires a display.
    figures: Any = import_module("matplotlib.figure")

    paths: list[Path] = []
    for chart in charts:
        figure = figures.Figure(figsize=(8.0, 4.0), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for number, series in enumerate(chart.series):
            style = "--" if series.is_reference else "o-" if chart.has_marks else "-"
            (line,) = axes.plot(*chart.points(series), style, label=series.name)
            for x, text in chart.beyond(series):
                axes.plot(x, chart.limit, "^", color=line.get_color(), clip_on=False)
                offset = (6, -12 - 9 * number)
                axes.annotate(
                    text, (x, chart.limit), offset, textcoords="offset points", fontsize=8
                )
        title = f"{chart.title}; {chart.note}" if chart.note else chart.title
        axes.set(title=title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_xlim(left=0.0)
        axes.set_ylim(0.0, None if chart.limit == math.inf else chart.limit)
        axes.grid(visible=True, alpha=0.4)
        if len(chart.series) > 1:
            axes.legend()
        path = folder / f"{chart.name}.png"
        figure.savefig(path)
        paths.append(path)
    return paths
