"""How commands are added to the command line. A command is a module with `add_parser` and `run`.

Owns the interface to argparse's subparsers, which have no public type, and the report of bad usage.
"""

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn, Protocol


class Parser(argparse.ArgumentParser):
    """Reports bad usage in one line, without the usage, which is long for a command with 84
    options.

    `fill` adds the options of a command when it is the one that was called, or whose help is shown:
    only that command imports the modules that declare them.
    """

    fill: "Callable[[Parser], None] | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        # No abbreviations: a prefix of a flag may become ambiguous in a later release.
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def filled(self) -> "Parser":
        """The parser, with all options."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads
        """As in argparse, with all options."""
        self.filled()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """As in argparse, with all options."""
        self.filled()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error, a suggestion, and how to get help; exit code 2."""
        if message.startswith("unrecognized"):
            options = [name for action in self._actions for name in action.option_strings]
            words = (word.partition("=")[0] for word in message.split())
            likely = (_did_you_mean(word, options) for word in words if word.startswith("--"))
            message += next(filter(None, likely), "")
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As in argparse; an unknown command is reported with the one that may have been meant."""
        commands: Any = action.choices
        if isinstance(action.choices, dict) and value not in commands:
            known = list(commands)
            likely = _did_you_mean(value, known) or f"; known are {', '.join(known)}"
            self.error(f"unknown command {value!r}{likely}")
        super()._check_value(action, value)


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return "".join(f"; did you mean {meant}?" for meant in near)


class Subparsers(Protocol):
    """The part of the result of `ArgumentParser.add_subparsers` that commands use."""

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Add a command; `settings` are those of ArgumentParser, and `help`."""
        ...
