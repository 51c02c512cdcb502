"""Draws the six measured figures of the README as one picture, one panel each.

Usage: `python docs/tools/figures_chart.py`. The values are from docs/figures.md, which lists the
machines and commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from svg_canvas import BLUE, GREEN, GREY, Canvas

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "figures.svg"
WIDTH, HEIGHT, PANEL_WIDTH, PANEL_HEIGHT = 900, 316, 300, 164
LABEL_WIDTH, VALUE_WIDTH, MARGIN = 96, 76, 14


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, the value that determines its length, and the value as displayed."""

    label: str
    value: float
    shown: str
    fill: str = BLUE


# Each panel has a separate axis from 0; grey bars are the systems that Penstock is compared with.
# For a range, the bar shows the worse end.
PANELS: tuple[tuple[str, str, tuple[Bar, ...]], ...] = (
    (
        "256 streams, one H100",
        "tokens/s; vLLM 0.20.2",
        (
            Bar("1B Penstock", 46_569, "46,569"),
            Bar("1B vLLM", 19_146, "19,146", GREY),
            Bar("8B Penstock", 9_309, "9,309"),
            Bar("8B vLLM", 8_358, "8,358", GREY),
        ),
    ),
    (
        "In time at 1.2x load, Azure trace",
        "% within both targets, simulated",
        (Bar("deadlines", 91.2, "91.2 %"), Bar("FCFS", 27.2, "27.2 %", GREY)),
    ),
    (
        "Multiplex, 256 streams",
        "tokens per core, as a multiple",
        (Bar("Penstock", 5.9, "5.9 to 7.9x"), Bar("bare grpc.aio", 1.0, "1x", GREY)),
    ),
    (
        "Scheduler, one step",
        "microseconds",
        (Bar("256 decodes", 24, "24"), Bar("1,024 decodes", 31, "31")),
    ),
    (
        "An open stream",
        "KiB of memory",
        (Bar("at 1,000", 30, "24 to 30"), Bar("at 5,000", 30, "24 to 30")),
    ),
    (
        "20 kills of the engine under load",
        "count; prompts without near ties",
        (
            Bar("kills", 20, "20", GREEN),
            Bar("lost requests", 0, "0"),
            Bar("wrong tokens", 0, "0"),
        ),
    ),
)


def main() -> None:
    """Write the picture."""
    canvas = Canvas("Six figures of Penstock", WIDTH, HEIGHT)
    for number, (title, unit, bars) in enumerate(PANELS):
        left = number % 3 * PANEL_WIDTH + MARGIN
        top = number // 3 * PANEL_HEIGHT + MARGIN
        canvas.text(left, top + 14, title, bold=True)
        canvas.text(left, top + 32, unit)
        longest = max(bar.value for bar in bars)
        scale = (PANEL_WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH) / longest
        axis = left + LABEL_WIDTH
        for row, bar in enumerate(bars):
            y = top + 42 + row * 26
            canvas.text(axis - 6, y + 15, bar.label, anchor="end")
            if bar.value:
                canvas.box(axis, y, bar.value * scale, 20, fill=bar.fill)
            canvas.text(axis + bar.value * scale + 6, y + 15, bar.shown)
        canvas.line((axis, top + 38), (axis, top + 42 + 26 * len(bars)))
    PICTURE.write_text(canvas.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
