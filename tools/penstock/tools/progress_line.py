"""A progress line on stderr that overwrites itself; shown only on a terminal."""

import sys


class ProgressLine:
    """Writes the progress line of a command. `heading`: text that is written before the text of
    `show`. With `is_shown` False, nothing is written.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self.heading = ""
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(self, text: str) -> None:
        """Overwrite the line with `text`."""
        if self._is_shown:
            print(f"\r\x1b[K{self.heading}{text}", end="", file=sys.stderr, flush=True)
            self._has_shown = True

    def end(self) -> None:
        """Leave the last text on the terminal and begin a new line."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)
            self._has_shown = False
