"""Draws shapes and text as SVG, for the pictures of docs/why-is-it-slow.md and docs/gpu.md.

The pictures have a light background, system fonts and no external resources. Also computes the
ticks of an axis and formats durations.
"""

from __future__ import annotations

import math
from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, QUIET, LINE, GROUND, BAND = "#1f2933", "#66727f", "#d5dbe1", "#ffffff", "#f5f7f9"
AMBER, ORANGE, BLUE, GREEN, RED, VIOLET, GREY = (
    "#f2b84b",
    "#ee7f3b",
    "#4a86d8",
    "#4fa678",
    "#d64545",
    "#8b6fc9",
    "#aeb8c2",
)
_STEPS = (1.0, 2.0, 5.0)


class Drawing:
    """Collects the elements of a picture, `width` pixels wide; `svg` takes the height."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        opacity: float = 1.0,
        title: str = "",
        radius: float = 0.0,
    ) -> None:
        """Add a filled box; `title` is its tooltip."""
        more = "" if opacity == 1.0 else f' opacity="{opacity:g}"'
        more += f' rx="{radius:g}"' if radius else ""
        end = f"><title>{escape(title)}</title></rect>" if title else "/>"
        box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {box} fill="{fill}"{more}{end}')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE) -> None:
        """Add a straight line."""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {ends} stroke="{stroke}"/>')

    def path(
        self, data: str, *, fill: str = "none", stroke: str = "none", opacity: float = 1.0
    ) -> None:
        """Add a path; `data`: the commands of its `d` attribute. Strokes are 1.4 pixels wide."""
        look = f'fill="{fill}" stroke="{stroke}" stroke-width="1.4" opacity="{opacity:g}"'
        self._parts.append(f'<path d="{data}" {look}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        is_bold: bool = False,
        is_mono: bool = False,
    ) -> None:
        """Add text on one line; `y` is its baseline."""
        more = ' font-weight="600"' if is_bold else ""
        more += f' font-family="{MONO}"' if is_mono else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}"{more}>'
            f"{escape(words)}</text>"
        )

    def svg(self, height: float, title: str) -> str:
        """Return the picture with this height, in pixels, and title."""
        box = f'viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" height="{height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{FONT}" role="img">'
        ground = f'<rect width="{self.width}" height="{height:.0f}" fill="{GROUND}"/>'
        named = f"<title>{escape(title)}</title>"
        return "\n".join((head, named, ground, *self._parts, "</svg>")) + "\n"


def ticks(length: float, max_num: int) -> list[float]:
    """Return round positions from 0 to `length`, at most `max_num` + 1 of them; [0.0] if `length`
    is not positive."""
    if not length > 0:
        return [0.0]
    raw = length / max_num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * each for each in _STEPS if power * each >= raw), power * 10.0)
    return [number * step for number in range(math.floor(length / step + 1e-9) + 1)]


def seconds(value_s: float) -> str:
    """Format a duration: 840 µs, 12.4 ms, 3.21 s."""
    if value_s == 0.0:
        return "0 s"
    if abs(value_s) < 0.9995e-3:
        return f"{value_s * 1e6:.0f} µs"
    if abs(value_s) < 0.9995:
        return f"{value_s * 1e3:.3g} ms"
    return f"{value_s:.2f} s" if abs(value_s) < 100 else f"{value_s:.0f} s"
