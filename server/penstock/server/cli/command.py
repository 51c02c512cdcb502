"""Where commands hang themselves in. A command is a module with `add_parser` and `run`.

Owns the face of argparse's collection of commands, for which argparse has no public name, and how
bad usage is reported.
"""

import argparse
import difflib
from typing import Any, NoReturn, Protocol


class Parser(argparse.ArgumentParser):
    """Reports bad usage in one line, which the usage of a command with 84 options would hide."""

    def error(self, message: str) -> NoReturn:
        """What is wrong, what may have been meant, and where the help is; exit code 2."""
        options = [name for action in self._actions for name in action.option_strings]
        for word in message.split():
            name = word.partition("=")[0]
            if message.startswith("unrecognized") and name.startswith("--"):
                likely = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
                message += "".join(f"; did you mean {meant}?" for meant in likely)
                break
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class Subparsers(Protocol):
    """What `ArgumentParser.add_subparsers` returns, as far as commands use it."""

    def add_parser(self, name: str, **settings: Any) -> argparse.ArgumentParser:
        """Add a command; `settings` are those of ArgumentParser, and `help`."""
        ...
