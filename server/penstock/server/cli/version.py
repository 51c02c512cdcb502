"""`penstock version`: prints the versions of installed packages, without importing them."""

import argparse
import platform

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import run_reporting
from penstock.server.cli.installation import PARTS, version_of

_EXIT_CODES_HELP = """\
exit codes:
  0    done
  2    invalid usage
  5    the output could not be written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C
  141  the reader of the output has exited
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the `version` subcommand."""
    subparsers.add_parser("version", help="print versions", epilog=_EXIT_CODES_HELP)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    del args
    return run_reporting("version", _print_versions)


def _print_versions() -> int:
    print(f"penstock {version_of('penstock') or 'of unknown version (not installed)'}")
    print(f"python {platform.python_version()}")
    for name in PARTS[1:]:
        if version := version_of(name):
            print(f"{name} {version}")
    return ExitCode.OK
