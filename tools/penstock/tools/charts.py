"""Line charts of the reports, drawn as SVG elements by matplotlib."""

# Types of matplotlib are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRIANGLE, _INFINITY, _ZERO_WIDTH_SPACE = "\u25b2", "\u221e", "\u200b"
_MAX_NAMES = 8


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
    """Lines over common linear axes that start at 0. `name`: unique among the charts of a page.
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
    # Only a report needs matplotlib, whose import takes 0.3 s of CPU.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(
        {
            "path.simplify_threshold": 1.0,  # pixels
            "svg.fonttype": "none",  # text remains text
            "svg.hashsalt": chart.name,  # the same ids in every run
            "text.parse_math": False,
        }
    ):
        figure = Figure(figsize=(8.0, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for number, series in enumerate(chart.series):
            _draw(axes, chart, series, number)
        is_limited = chart.limit < math.inf
        note = f"; {_TRIANGLE} over {chart.limit_text}" if is_limited else ""
        axes.set(title=chart.title + note, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_xlim(left=0.0)
        axes.set_ylim(0.0, chart.limit if is_limited else None)
        axes.grid(visible=True, alpha=0.4)
        if len(chart.series) > 1:
            if len(chart.series) > _MAX_NAMES:
                axes.plot([], [], " ", label=f"and {len(chart.series) - _MAX_NAMES} more")
            figure.legend(loc="outside lower center", ncols=3)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Title": chart.title})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: "Axes", chart: Chart, series: Series, number: int) -> None:
    """Draw the line `number` of the chart, and the triangles of its values above the limit."""
    style = "--" if series.is_reference else "o-" if chart.has_marks else "-"
    name = _legend_text(series.name) if number < _MAX_NAMES else "_no_legend"
    is_finite = np.isfinite(series.x) & np.isfinite(series.y)
    (line,) = axes.plot(series.x[is_finite], series.y[is_finite], style, label=name)
    for x, text in chart.beyond(series):
        axes.plot(x, chart.limit, "^", color=line.get_color(), clip_on=False)
        offset = (6, -12 - 9 * number)
        axes.annotate(text, (x, chart.limit), offset, textcoords="offset points", fontsize=8)


def _legend_text(name: str) -> str:
    """Return `name` so that matplotlib shows it: a name that begins with "_" has no legend."""
    return f"{_ZERO_WIDTH_SPACE}{name}" if name.startswith("_") else name


def _value_text(value: float) -> str:
    if value == math.inf:
        return _INFINITY
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
