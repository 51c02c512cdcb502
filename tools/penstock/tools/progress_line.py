"""A line of progress on stderr that is written over on a terminal; nothing elsewhere.

Owns the line. Does not measure progress.
"""

import sys


class ProgressLine:
    """`heading`: the text before the rest, such as which of several runs this is."""

    def __init__(self, *, is_shown: bool) -> None:
        self.heading = ""
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(self, text: str) -> None:
        """Write the line again."""
        if self._is_shown:
            print(f"\r\x1b[K{self.heading}{text}", end="", file=sys.stderr, flush=True)
            self._has_shown = True

    def end(self) -> None:
        """Leave the line."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)
            self._has_shown = False
