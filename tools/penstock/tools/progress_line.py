"""A progress line on stderr, overwritten on a terminal; nothing is written elsewhere.

Owns the line. Does not measure progress.
"""

import sys


class ProgressLine:
    """`heading`: the text before the progress, such as which of several runs this is."""

    def __init__(self, *, is_shown: bool) -> None:
        self.heading = ""
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(self, text: str) -> None:
        """Overwrite the line."""
        if self._is_shown:
            print(f"\r\x1b[K{self.heading}{text}", end="", file=sys.stderr, flush=True)
            self._has_shown = True

    def end(self) -> None:
        """Keep the line and begin a new one."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)
            self._has_shown = False
