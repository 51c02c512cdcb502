"""Converts a frame of `penstock top` to SVG, with light colours.

Rich exports the frame as a picture of a terminal window; this module changes the colours, and
removes the title bar of the window.
"""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from penstock.server.cli.top_state import TopState
from penstock.server.cli.top_view import frame_of
from picture_svg import MONO

COLUMNS = 112
_FORMAT = """\
<svg viewBox="0 26 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>penstock top</title>
<style>
.{unique_id}-matrix {{ font-family: MONO; font-size: {char_height}px; }}
{styles}
</style>
<rect x="1" y="27" width="{width}" height="{height}" rx="8" fill="#fcfcfa" stroke="#d5dbe1"/>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
""".replace("MONO", MONO)
_LIGHT = TerminalTheme(
    (252, 252, 250),
    (31, 41, 51),
    [
        (31, 41, 51),
        (200, 50, 50),
        (62, 140, 98),
        (196, 120, 10),
        (58, 112, 196),
        (132, 86, 190),
        (12, 130, 150),
        (120, 130, 140),
    ],
    [
        (168, 178, 188),
        (214, 69, 69),
        (79, 166, 120),
        (214, 140, 30),
        (74, 134, 216),
        (139, 111, 201),
        (30, 150, 170),
        (60, 70, 80),
    ],
)
_CLIP = re.compile(r' clip-path="[^"]*"')
_BOX = re.compile(r'viewBox="0 26 ([\d.]+) ([\d.]+)"')
_FRAME = re.compile(r'<rect x="1" y="27" width="([\d.]+)" height="([\d.]+)"')
_WINDOW_BAR = 18.0
"""Height of the window bar, which is removed, in pixels."""


def top_svg(state: TopState) -> str:
    """Return the frame that `penstock top --once` prints for this state, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(frame_of(state, width=COLUMNS))
    drawn = console.export_svg(
        title="", theme=_LIGHT, code_format=_FORMAT, font_aspect_ratio=0.61, unique_id="top"
    )
    drawn = _BOX.sub(lambda box: _sized('viewBox="0 26 {:g} {:g}"', box, 0.0), drawn)
    drawn = _FRAME.sub(
        lambda box: _sized('<rect x="1" y="27" width="{:g}" height="{:g}"', box, 2.0), drawn
    )
    return _CLIP.sub("", drawn)


def _sized(form: str, box: re.Match[str], less: float) -> str:
    return form.format(float(box[1]) - less, float(box[2]) - _WINDOW_BAR - less)
