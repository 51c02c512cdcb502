"""Records a command in a pseudo-terminal, and renders the recording as an animated picture.

Writes the cast (asciicast v2, one line of JSON per piece of output) and the picture (SVG with CSS
animation, without scripts or external resources). The picture has the timing of the recording,
except that waits longer than `--max-wait` are shortened; the picture states this.

    python docs/tools/record_cast.py --picture kill.svg --cast kill.cast -- penstock demo --kill
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 92, 22
CHAR_WIDTH, LINE_HEIGHT, MARGIN, BAR = 7.9, 17, 14, 20
PAPER, INK, FAINT, MARK = "#1b1f27", "#d7dce5", "#8d97a6", "#ffb454"
MARKED = "kill -9"
HOLD_S = 4.0
"""How long the last frame is displayed, seconds: when the picture is opened, and before it
repeats.
"""
FRAME_S = 0.25
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()].")


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of the command's output, read `at_s` seconds after the command's start."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The terminal's content from `at_s` seconds until the next frame: one line of text per row."""

    at_s: float
    lines: tuple[str, ...]


def record(command: Sequence[str], *, columns: int, rows: int) -> list[Output]:
    """Run the command in a pseudo-terminal to its end, and return its output. Raises
    CalledProcessError if its exit code is not 0.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    size = {"COLUMNS": str(columns), "LINES": str(rows), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **size}
    )
    os.close(theirs)
    begun_s = time.monotonic()
    found: list[Output] = []
    while True:
        select.select([ours], [], [])
        try:
            piece = os.read(ours, 65536)
        except OSError:  # raised on Linux when the last writer has closed the terminal
            break
        found.append(Output(time.monotonic() - begun_s, piece.decode("utf-8", "replace")))
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return found


def cast_text(outputs: Sequence[Output], title: str, *, columns: int, rows: int) -> str:
    """Return the recording as an asciicast v2 file."""
    header = {"version": 2, "width": columns, "height": rows, "title": title}
    events = [json.dumps([round(one.at_s, 3), "o", one.text]) for one in outputs]
    return "\n".join([json.dumps(header), *events, ""])


def read_cast(path: Path) -> tuple[str, list[Output]]:
    """Return title and output of an asciicast v2 file."""
    header, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return header["title"], [Output(at_s, text) for at_s, kind, text in events if kind == "o"]


class Screen:
    """Emulates the terminal functions that the commands use: line feed, carriage return, cursor up,
    erase line.
    """

    def __init__(self, *, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._lines = [""]
        self._row = self._column = 0
        self._unfinished = ""

    def write(self, text: str) -> None:
        """Write text to the screen. Colours and unknown sequences are ignored."""
        text, at = self._unfinished + text, 0
        for found in SEQUENCE.finditer(text):
            self._print(text[at : found.start()])
            self._control(found[1], found[2])
            at = found.end()
        # The end of the piece may split an escape sequence.
        whole, mark, begun = text[at:].partition("\x1b")
        self._print(whole)
        self._unfinished = mark + begun

    @property
    def lines(self) -> tuple[str, ...]:
        """The visible lines: the last ones that fit on the screen, without trailing spaces."""
        return tuple(line.rstrip() for line in self._lines[-self._rows :])

    def _control(self, numbers: str | None, kind: str | None) -> None:
        count = int(numbers) if numbers and numbers.isdecimal() else 1
        if kind == "A":
            self._row = max(0, self._row - count)
        elif kind == "K":
            self._lines[self._row] = ""

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self._line_feed()
            else:
                if self._column == self._columns:
                    self._column = 0
                    self._line_feed()
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
                self._column += 1

    def _line_feed(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")


def frames(outputs: Sequence[Output], *, max_wait_s: float, columns: int, rows: int) -> list[Frame]:
    """Return the frames, at least `FRAME_S` apart; waits longer than `max_wait_s` are shortened to
    that.
    """
    screen = Screen(columns=columns, rows=rows)
    found = [Frame(0.0, ())]
    at_s = before_s = 0.0
    for output in outputs:
        at_s += min(output.at_s - before_s, max_wait_s)
        before_s = output.at_s
        screen.write(output.text)
        if screen.lines == found[-1].lines:
            continue
        if at_s - found[-1].at_s < FRAME_S:
            found[-1] = Frame(found[-1].at_s, screen.lines)
        else:
            found.append(Frame(round(at_s, 2), screen.lines))
    return found


def picture(shown: Sequence[Frame], title: str, note: str, *, columns: int) -> str:
    """Return an SVG that shows the last frame and then plays all frames in a loop; with reduced
    motion, only the last frame.

    The SVG is as high as the frame with the most lines. The frames are stacked vertically; the
    animation scrolls them in jumps past a window of the size of one frame.
    """
    total_s = shown[-1].at_s + HOLD_S
    rows = max(_num_rows(frame) for frame in shown)
    inner_width, inner_height = columns * CHAR_WIDTH, rows * LINE_HEIGHT + 6
    width, height = inner_width + 2 * MARGIN, inner_height + 2 * MARGIN + BAR
    at = [f"transform:translateY({-number * inner_height}px)" for number in range(len(shown))]
    moments = "".join(
        f"{frame.at_s / total_s:.3%}{{{place}}}" for frame, place in zip(shown, at, strict=True)
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height}' role='img' "
            f"font-family='DejaVu Sans Mono, Menlo, Consolas, monospace' font-size='13'>",
            f"<title>{escape(title)}</title>",
            f"<style>text{{white-space:pre;fill:{INK}}}.m{{fill:{MARK}}}.f{{fill:{FAINT}}}"
            f"@keyframes p{{{moments}}}"
            # A negative delay starts the loop at the last frame, not at an almost empty one.
            f"#p{{{at[-1]};animation:p {total_s:.2f}s step-end -{shown[-1].at_s:.2f}s infinite}}"
            "@media(prefers-reduced-motion:reduce){#p{animation:none}}</style>",
            f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
            f"<text x='{MARGIN}' y='24'>$ {escape(title)}</text>",
            f"<text x='{width - MARGIN:g}' y='24' text-anchor='end' class='f'>{note}</text>",
            f"<svg x='{MARGIN}' y='{BAR + MARGIN}' width='{inner_width:g}' "
            f"height='{inner_height}'><g id='p'>",
            *(_drawn(frame, number * inner_height) for number, frame in enumerate(shown)),
            "</g></svg></svg>",
            "",
        ]
    )


def _num_rows(frame: Frame) -> int:
    """Return the number of rows up to the last line that is not empty."""
    return max((row for row, line in enumerate(frame.lines, 1) if line), default=1)


def _drawn(frame: Frame, top: int) -> str:
    return "".join(
        f"<text y='{top + (row + 1) * LINE_HEIGHT - 4}'{_class_of(line)}>{escape(line)}</text>"
        for row, line in enumerate(frame.lines)
        if line
    )


def _class_of(line: str) -> str:
    return " class='m'" if line.startswith(MARKED) else ""


def main() -> None:
    """Record the command if one is given, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cast", type=Path, help="written, or read where no command is given")
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--max-wait", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    size = {"columns": args.columns, "rows": args.rows}
    if args.command:
        outputs = record(args.command, **size)
        title = " ".join([Path(args.command[0]).name, *args.command[1:]])
        if args.cast:
            args.cast.write_text(cast_text(outputs, title, **size), encoding="utf-8")
    elif args.cast:
        title, outputs = read_cast(args.cast)
    else:
        parser.error("--cast or a command is needed")
    shown = frames(outputs, max_wait_s=args.max_wait, **size)
    taken_s = outputs[-1].at_s
    note = f"recorded; {taken_s:.0f} s"
    if shown[-1].at_s < taken_s - 0.5:
        note += f", waits over {args.max_wait:g} s cut"
    args.picture.write_text(picture(shown, title, note, columns=args.columns), encoding="utf-8")


if __name__ == "__main__":
    main()
