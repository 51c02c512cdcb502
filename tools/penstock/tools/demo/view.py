"""Displays the demo's concurrent streams.

`PaneView` draws one pane per stream on a terminal; `LineView` writes plain lines to other outputs.
"""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from penstock.tools.demo.run import DemoRun

_MAX_LINE_CHARS = 72
_MAX_PANE_LINES = 8
_LASTING_STATES = ("PENDING", "PROCESSING")
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_LINE = "\x1b[2K"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class View(Protocol):
    """Interface of the classes that display the progress of runs."""

    def on_state(self, run: DemoRun) -> None:
        """Display the new state of the run."""
        ...

    def on_text(self, run: DemoRun, text: str) -> None:
        """Display the new text of the run."""
        ...

    def close(self) -> None:
        """Display text that is not displayed yet, and end the display."""
        ...


def choose_view(out: TextIO, runs: Sequence[DemoRun]) -> View:
    """Return a PaneView if `out` is a terminal, else a LineView."""
    return PaneView(out, runs) if out.isatty() else LineView(out)


class LineView:
    """Writes plain lines that start with the request's name: states and text as they arrive."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._pending: dict[str, str] = {}

    def on_state(self, run: DemoRun) -> None:
        """Write the text that is not written yet, then the new state."""
        self._flush(run.request.name)
        self._write(run.request.name, f"* {_state(run)}")

    def on_text(self, run: DemoRun, text: str) -> None:
        """Write the lines that the text completes, wrapped at 72 characters; keep the rest for
        later.
        """
        name = run.request.name
        pending = self._pending.get(name, "") + text
        *whole, rest = pending.split("\n")
        for line in whole:
            self._write(name, line)
        while len(rest) > _MAX_LINE_CHARS:
            cut = rest.rfind(" ", 1, _MAX_LINE_CHARS)
            cut = cut if cut > 0 else _MAX_LINE_CHARS
            self._write(name, rest[:cut])
            rest = rest[cut:].lstrip(" ")
        self._pending[name] = rest

    def close(self) -> None:
        """Write the text that is not written yet."""
        for name in list(self._pending):
            self._flush(name)

    def _flush(self, name: str) -> None:
        rest = self._pending.pop(name, "")
        if rest:
            self._write(name, rest)

    def _write(self, name: str, line: str) -> None:
        self._out.write(f"{name:<9}| {line}".rstrip() + "\n")
        self._out.flush()


class PaneView:
    """Draws one pane per request; each redraw overwrites the previous one."""

    def __init__(
        self,
        out: TextIO,
        runs: Sequence[DemoRun],
        terminal_size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
        headline: str = "",
    ) -> None:
        self._out = out
        self._runs = runs
        self._terminal_size = terminal_size
        self._headline = headline
        self._num_drawn = 0
        out.write(_HIDE_CURSOR)
        self._draw()

    def on_state(self, run: DemoRun) -> None:
        """Draw all panes again, with the new state."""
        del run
        self._draw()

    def on_text(self, run: DemoRun, text: str) -> None:
        """Draw all panes again, with the new text."""
        del run, text
        self._draw()

    def set_headline(self, headline: str) -> None:
        """Draw all panes again with another headline; only for a view created with a headline."""
        self._headline = headline
        self._draw()

    def close(self) -> None:
        """Draw all panes a last time and show the cursor again."""
        self._draw()
        self._out.write(_SHOW_CURSOR)
        self._out.flush()

    def _draw(self) -> None:
        columns, rows = self._terminal_size()
        head = [self._headline[: columns - 1]] if self._headline else []
        lines = head + pane_lines(self._runs, columns=columns, rows=rows - len(head))
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        body = "".join(f"{_ERASE_LINE}{line}\n" for line in lines)
        self._out.write(f"{up}\r{body}")
        self._out.flush()
        self._num_drawn = len(lines)


def pane_lines(runs: Sequence[DemoRun], *, columns: int, rows: int) -> list[str]:
    """Return the lines to draw: for each run a bold heading and the last lines of its text.

    `columns`: the width of the terminal; `rows`: the lines available. For a given size and number
    of runs the number of lines is constant, and no line is wider than the terminal, so that each
    drawing overwrites the previous one.
    """
    num_text_lines = max(1, min(_MAX_PANE_LINES, (rows - 2) // max(1, len(runs)) - 1))
    lines: list[str] = []
    for run in runs:
        unit = "token" if run.num_tokens == 1 else "tokens"
        head = f"{run.request.name}: {_state(run)}, {run.num_tokens} {unit}"
        lines.append(f"{_BOLD}{head[: columns - 1]}{_PLAIN}")
        shown = _wrap(run.text, columns - 3)[-num_text_lines:]
        shown += [""] * (num_text_lines - len(shown))
        lines += [f"  {line}".rstrip() for line in shown]
    return lines


def _state(run: DemoRun) -> str:
    """Return the state of the run and when it began, in milliseconds after submission: "since" a
    time for a state that lasts, "after" a time for one that ends the request.
    """
    if not run.states:
        return run.state
    word = "since" if run.state in _LASTING_STATES else "after"
    return f"{run.state} {word} {run.states[-1][1] * 1e3:.0f} ms"


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines():
        lines += textwrap.wrap(line, max(1, width)) or [""]
    return lines
