"""Progress of a simulation, for a terminal.

Owns the line. Does not know what is simulated.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tools.simulation.simulate import Progress


class ProgressLine:
    """One line on stderr that is written over, in a terminal; nothing elsewhere.

    `heading`: the text before the rest, which of several runs this is.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self.heading = ""
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(self, progress: "Progress") -> None:
        """Write the line again."""
        if not self._is_shown:
            return
        minutes, rest_s = divmod(int(progress.now_s), 60)
        speed = progress.now_s / progress.wall_s if progress.wall_s else 0.0
        print(
            f"\r\x1b[K{self.heading}{minutes // 60}:{minutes % 60:02}:{rest_s:02} simulated,"
            f" {speed:,.0f}x;"
            f" {progress.num_ended:,} of {progress.num_arrived:,} ended,"
            f" {progress.num_running:,} running, {progress.num_waiting:,} waiting",
            end="",
            file=sys.stderr,
            flush=True,
        )
        self._has_shown = True

    def end(self) -> None:
        """End the line."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)
            self._has_shown = False
