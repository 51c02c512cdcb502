"""Draws boxes, arrows and text as SVG.

The pictures have a white background, so that they are also readable on a dark page, and colours
that colour-blind readers can distinguish.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, FAINT, PAPER = "#222222", "#999999", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY = "#cfe3f5", "#fbe3bd", "#cdebdf", "#f5cdbb", "#ededed"
_FONT = "font-family='Helvetica, Arial, sans-serif'"


class Canvas:
    """One picture. Coordinates are pixels from the upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' {_FONT} font-size='13'>",
            f"<title>{escape(title)}</title>",
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
            "markerHeight='7' orient='auto'>"
            f"<path d='M0,0 L10,5 L0,10 z' fill='{INK}'/></marker></defs>",
            f"<rect width='{width}' height='{height}' fill='{PAPER}'/>",
        ]

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", fill: str = BLUE
    ) -> None:
        """Draw a box with centred text, one line for each line of `text`."""
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='3' "
            f"fill='{fill}' stroke='{INK}'/>"
        )
        lines = text.splitlines()
        for number, line in enumerate(lines):
            offset = (number - (len(lines) - 1) / 2) * 16
            self.text(x + width / 2, y + height / 2 + offset + 4, line, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Draw one line of text; `anchor` sets which part of it is at x: start, middle, end."""
        style = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='{INK}'{style}>"
            f"{escape(text)}</text>"
        )

    def line(self, *points: tuple[float, float], dashed: bool = False, faint: bool = False) -> None:
        """Draw a line through the points."""
        self._draw(points, dashed=dashed, colour=FAINT if faint else INK, marker="")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through the points with an arrowhead at its end."""
        self._draw(points, dashed=dashed, colour=INK, marker=" marker-end='url(#head)'")

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        return "\n".join([*self._parts, "</svg>", ""])

    def _draw(
        self, points: tuple[tuple[float, float], ...], *, dashed: bool, colour: str, marker: str
    ) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.3'{dashes}"
            f"{marker}/>"
        )
