"""Common code of commands that connect to a service: the address, and the report of failures.

Defines the `--address` option, and converts failures to a line on stderr and an exit code.
"""

import argparse
import contextlib
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.conventions import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    MAX_PORT,
    NO_CREDENTIALS,
    OPERATIONS_OFFSET,
)
from penstock.server.cli.command import ExitCode
from penstock.server.settings.table import variable_of

if TYPE_CHECKING:
    from penstock.client import PenstockError

ADDRESS_VARIABLE = variable_of("address")
OPERATIONS_VARIABLE = variable_of("operations")
_PORT_VARIABLE = variable_of("port")
_OPERATIONS_PORT_VARIABLE = variable_of("operations_port")

_FIELD = re.compile(r"\b(?:[a-z_]+\.)*([a-z_]+)(?:\[\d+\])?: ")
_FLAGS = {"num_outputs": "n", "stop_strings": "stop", "total_timeout": "deadline"}
"""Request field -> flag that sets it, where their names differ."""
_ARGUMENTS = {"text_prompt.text: ": "prompt: "}
"""Path of a request field, as in an error -> argument without a flag that sets the field."""


class UsageError(Exception):
    """An argument is invalid. The message names the argument."""


def default_address(environment: Mapping[str, str]) -> str:
    """Return PENSTOCK_ADDRESS; if unset, this host with the port in PENSTOCK_PORT, or with the
    default port if that is unset too."""
    return default_address_source(environment)[0]


def default_operations_address(environment: Mapping[str, str]) -> str:
    """Return PENSTOCK_OPERATIONS; if unset, this host with the port in PENSTOCK_OPERATIONS_PORT; if
    that is not a number, this host with the port that follows the port of the service."""
    return _default_operations_address(environment)[0]


def default_address_source(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the default address and the name of the variable that sets it."""
    if ADDRESS_VARIABLE in environment:
        return environment[ADDRESS_VARIABLE], ADDRESS_VARIABLE
    port = environment.get(_PORT_VARIABLE, str(DEFAULT_PORT))
    if port.startswith("tcp://"):
        # Kubernetes sets the variable to a URL for a service called penstock.
        port = str(DEFAULT_PORT)
    return f"{DEFAULT_HOST}:{port}", _PORT_VARIABLE


def _default_operations_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the default address of the operations port and the name of the variable that sets
    it."""
    if OPERATIONS_VARIABLE in environment:
        return environment[OPERATIONS_VARIABLE], OPERATIONS_VARIABLE
    port, variable = environment.get(_OPERATIONS_PORT_VARIABLE, ""), _OPERATIONS_PORT_VARIABLE
    if not _is_number(port):
        # The variable may be unset, "off", or a URL from Kubernetes: tcp://...
        main_port, variable = environment.get(_PORT_VARIABLE, ""), _PORT_VARIABLE
        port = str((int(main_port) if _is_number(main_port) else DEFAULT_PORT) + OPERATIONS_OFFSET)
    return f"{DEFAULT_HOST}:{port}", variable


def _is_number(text: str) -> bool:
    # `int` also accepts digits of other alphabets.
    return text.isascii() and text.isdecimal()


def add_operations_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--address` (alias `--service`) for the address of the operations port. Its
    default is `default_operations_address`."""
    address, variable = _default_operations_address(os.environ)
    parser.add_argument(
        "--address",
        "--service",
        metavar="HOST[:PORT]",
        action=_AddressFlag,
        default=address,
        help=f"the service's operations port (default: ${OPERATIONS_VARIABLE}, or this host at"
        f" ${_OPERATIONS_PORT_VARIABLE} or one above ${_PORT_VARIABLE},"
        f" {DEFAULT_PORT + OPERATIONS_OFFSET})",
    )
    parser.set_defaults(address_source=variable)


def add_address_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--address`. Its default is `default_address`."""
    address, variable = default_address_source(os.environ)
    parser.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        action=_AddressFlag,
        default=address,
        help=f"the service (default: ${ADDRESS_VARIABLE}, or this host at ${_PORT_VARIABLE} or"
        f" {DEFAULT_PORT})",
    )
    parser.set_defaults(address_source=variable)


class _AddressFlag(argparse.Action):
    """Stores the value of an address flag, and the name of the flag as `address_source`. Without
    the flag, `address_source` is the name of the variable that sets the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 (the name of argparse)
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the address and the name of the flag in `namespace`."""
        namespace.address = values
        namespace.address_source = option_string


def connection_error(args: argparse.Namespace, error: Exception) -> UsageError:
    """Return the UsageError for an error of a client's constructor. If the address is invalid, it
    names the argument or the variable that set the address."""
    line = str(error)
    if not line.startswith("address:"):
        return UsageError(line)
    source: str = args.address_source
    if source not in (_PORT_VARIABLE, _OPERATIONS_PORT_VARIABLE):
        return UsageError(source + line.removeprefix("address"))
    port = os.environ[source]
    if _is_number(port) and int(port) == MAX_PORT:
        # The port itself is valid; the command connects to the one after it.
        return UsageError(
            f"{source} is {port}, and there is no next port for operations: set --address or"
            f" {_OPERATIONS_PORT_VARIABLE}"
        )
    return UsageError(f"{source}: the port must be from 1 to {MAX_PORT}, not {port!r}")


def seconds(text: str) -> float:
    """Parse a positive number of seconds; used as the `type` of an argument. Raises
    ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value


def run_reporting(command: str, action: Callable[[], int]) -> int:
    """Run `action` and return the exit code.

    A failure is reported as one line on stderr, without a traceback.
    """
    # gRPC's core writes to stderr, e.g. when a server disconnects, but stderr is reserved for the
    # lines of commands.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    out: object = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        # Characters that a terminal cannot display become question marks instead of an error.
        out.reconfigure(errors="replace")
    try:
        code = action()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return _report(command, error)
    return code


def _report(command: str, error: BaseException) -> int:
    """Report why a command failed, and return its exit code."""
    from penstock.client import PenstockError
    from penstock.server.settings.sources import BadSetting

    if isinstance(error, BrokenPipeError):
        _discard_output()
        return ExitCode.BROKEN_PIPE
    match error:
        case UnicodeDecodeError():
            line, code = f"stdin: is not {error.encoding} text", ExitCode.USAGE
        case UsageError() | BadSetting():
            line, code = str(error), ExitCode.USAGE
        case PenstockError():
            line, code = describe_error(error), exit_code_of(error)
        case KeyboardInterrupt():
            line, code = "interrupted", ExitCode.INTERRUPTED
        case OSError(filename=str() | Path() as name):
            _discard_output()
            line, code = f"{as_typed(str(name))}: {error.strerror}", ExitCode.INPUT_OUTPUT
        case OSError():
            _discard_output()
            line, code = f"input or output failed: {error}", ExitCode.INPUT_OUTPUT
        case MemoryError() | OverflowError() | RecursionError():
            line = f"the request exceeds this machine's limits: {_error_with_location(error)}"
            code = ExitCode.USAGE
        case _:
            line = f"internal error, please report it: {_error_with_location(error)}"
            code = ExitCode.BUG
    return _fail(command, line, code)


def _error_with_location(error: BaseException) -> str:
    """Return the type, message and source location of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def as_typed(value: str) -> str:
    """Return a command-line value as an error message quotes it: after its flag, if it has one."""
    for flag, word in zip(sys.argv, sys.argv[1:], strict=False):
        if word == value and flag.startswith("--"):
            return f"{flag} {value}"
    return value


def describe_error(error: "PenstockError") -> str:
    """Return the error in one line, with flags instead of the fields that they set. If the call had
    no credentials, the line also names the flag that sets them."""
    line = with_flags(str(error).replace("\n", " "))
    return f"{line}; set --token-file" if error.message == NO_CREDENTIALS else line


def with_flags(line: str) -> str:
    """Return `line`, in which each request field is replaced by its flag if this command line has
    the flag, and the field of the prompt by `prompt`."""

    def flag_of(found: re.Match[str]) -> str:
        name = _FLAGS.get(found[1], found[1]).replace("_", "-")
        if f"--{name}" in sys.argv:
            return f"--{name} "
        return _ARGUMENTS.get(found[0], found[0])

    return _FIELD.sub(flag_of, line)


def exit_code_of(error: "PenstockError") -> ExitCode:
    """Return the exit code of a failure."""
    from penstock.client import DeadlineExceeded, Unavailable

    if isinstance(error, Unavailable):
        return ExitCode.UNAVAILABLE
    if isinstance(error, DeadlineExceeded):
        return ExitCode.DEADLINE
    return ExitCode.FAILED


def _discard_output() -> None:
    """Redirect stdout to the null device, because Python flushes stdout at exit and would fail
    again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _fail(command: str, line: str, code: ExitCode) -> int:
    # If stderr cannot be written either, the exit code is the only report.
    with contextlib.suppress(OSError):
        print(f"penstock {command}: {line}", file=sys.stderr, flush=True)
    return code
