"""The interface of commands, and how they are added to the command line.

A command is a module with `add_parser` and `run`. This module also contains the report of usage
errors, the exit codes, the interruption of commands that start a service, and the interface of
argparse's subparsers, because argparse has no public type for them.
"""

import argparse
import asyncio
import contextlib
import enum
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, Protocol

from penstock.server.settings.json_values import nearest

COMMAND_EXIT_CODES_HELP = """\
exit codes:
  0    done (health: serving)
  1    the request was rejected or failed (health: not serving)
  2    invalid usage, or the request exceeds this machine's limits
  3    no service at the address, or it takes no requests
  4    a deadline passed
  5    the input could not be read, or the output not written; the request was cancelled
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C; the request was cancelled
  141  the reader of the output has exited; the request was cancelled
"""

_NUMBERS: Mapping[Any, str] = {int: "an integer", float: "a number"}
"""Type of an argument -> what its value must be."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a usage error in one line. It omits the usage text, because
    this is long for a command with many options.

    `fill` adds the options of a command only when the command is called or its help is displayed,
    because adding them imports the modules that declare the options.
    """

    fill: "Callable[[Parser], None] | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        usual: dict[str, Any] = {
            # Abbreviated flags are not accepted, because they may become ambiguous in a later
            # release.
            "allow_abbrev": False,
            "epilog": COMMAND_EXIT_CODES_HELP,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }
        super().__init__(*args, **{**usual, **settings})

    def filled(self) -> "Parser":
        """Return the parser after `fill` has added its options."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads
        """Same as `argparse.ArgumentParser.parse_known_args`, with the options that `fill` adds."""
        self.filled()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Same as `argparse.ArgumentParser.format_help`, with the options that `fill` adds."""
        self.filled()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error and how to get help, then exit with code 2. The error for an unknown
        option suggests a similar one."""
        if message.startswith("unrecognized"):
            options = [name for action in self._actions for name in action.option_strings]
            words = (word.partition("=")[0] for word in message.split())
            likely = (nearest(word, options) for word in words if word.startswith("--"))
            message += next(filter(None, likely), "")
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Same as argparse's method, but the errors have the form of those of settings."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            wanted = _NUMBERS.get(action.type)
            fault = f"must be {wanted}, not {arg_string!r}" if wanted else error.message
            self.error(f"{_spelling(action)} {fault}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Same as argparse's method, but the errors have the form of those of settings, and the
        error for an unknown command suggests a similar one."""
        choices: Any = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        known = ", ".join(names)
        if isinstance(choices, dict):
            likely = nearest(value, names) or f"; known are {known}"
            self.error(f"unknown command {value!r}{likely}")
        self.error(f"{_spelling(action)} must be one of {known}, not {value!r}")


def _spelling(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or action.dest


class Subparsers(Protocol):
    """The methods that commands use of the return value of `ArgumentParser.add_subparsers`."""

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Add a subcommand and return its parser. `settings` are the arguments of ArgumentParser,
        and `help`."""
        ...


async def until_signal(work: Coroutine[Any, Any, int], interrupted_line: str) -> int:
    """Run the work and return its exit code, or 128 + n if Ctrl-C or SIGTERM (signal n) ended it.

    If a signal ended it, `interrupted_line` is written to stderr after the work has cleaned up.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    interrupted_by = 0

    def interrupt(number: signal.Signals) -> None:
        nonlocal interrupted_by
        # Handle only the first signal, because a second one must not interrupt the shutdown of the
        # service.
        if not interrupted_by:
            interrupted_by = number
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    print(interrupted_line, file=sys.stderr, flush=True)
    return 128 + interrupted_by


class ExitCode(enum.IntEnum):
    """Exit codes of commands, from OK (0) to BROKEN_PIPE (141). BUG (70) means an unexpected
    error."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    DEADLINE = 4
    INPUT_OUTPUT = 5
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141
