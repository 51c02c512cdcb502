"""Parses the command line `penstock <command>`, and runs the command.

Contains the top-level parser. Commands import large packages only when they run, so that `penstock
--help` is fast. Each command's help lists its exit codes. Those of the client commands, such as
`generate`, are in `penstock.server.cli.command`; the other commands define theirs.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.conventions.extras import requires_extra
from penstock.server.cli import chat, generate, health, models, serve, top, version
from penstock.server.cli.command import ExitCode, Parser
from penstock.server.cli.installation import version_of
from penstock.server.cli.variables import misspelling_warnings
from penstock.tools import build
from penstock.tools.bench import command as bench
from penstock.tools.demo import command as demo
from penstock.tools.plan import command as plan
from penstock.tools.simulation import command as simulate
from penstock.tools.timeline import command as timeline
from penstock.tools.verify import command as verify

_COMMANDS = (
    *(serve, build, generate, chat, models, health, top, verify, bench, simulate, plan),
    *(timeline, demo, version),
)
_OF_SERVER = (
    *("numpy", "uvloop", "tokenizers", "msgspec", "jinja2", "prometheus_client"),
    "grpc_reflection",
)
_EXTRAS: Mapping[str, tuple[Collection[str], Sequence[str]]] = {
    "server": (("serve", "build"), _OF_SERVER),
    "tools": (("verify", "simulate", "plan", "timeline", "demo"), _OF_SERVER),
    "bench": (("bench",), ("numpy", "msgspec", "hdrh")),
}
"""For each extra: the commands that need it, and the packages, installed by it, that are
checked.
"""
_WITH_MODEL = ("serve", "demo")
"""Commands that run a model in-process by default, which needs the extra `torch`; that includes
`server`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. `argv` None: the process's arguments."""
    try:
        words = sys.argv[1:] if argv is None else argv
        parser = build_parser()
        if not words:
            parser.print_help()
            return ExitCode.USAGE
        missing = _missing_extra(words)
        if missing:
            print(f"penstock {words[0]}: {missing}", file=sys.stderr)
            return ExitCode.USAGE
        if words[0] == "serve":
            serve.report_start(words)
        args, unknown = parser.parse_known_args(words)
        # The command's parser handles its options.
        asked = getattr(args, "parser", parser)
        if unknown:
            asked.error(f"unrecognized arguments: {' '.join(_without_values(unknown))}")
        if asked is parser:
            parser.error("a command is required")
    except SystemExit as stop:
        # argparse raises SystemExit after --help (0) and after invalid usage (2).
        return stop.code if isinstance(stop.code, int) else 0
    run: Callable[[argparse.Namespace], int] = args.run
    if run is not serve.run:  # It writes the warnings to its log.
        for warning in misspelling_warnings(os.environ):
            print(f"{asked.prog}: {warning}", file=sys.stderr)
    return run(args)


def _without_values(unknown: list[str]) -> list[str]:
    """Return the options in unrecognized arguments, without what may be their values; all arguments
    if none is an option."""
    options = [word for word in unknown if word[:1] == "-" and not word[1:2].isdecimal()]
    return options or unknown


def _missing_extra(words: Sequence[str]) -> str:
    """Return the error for the first package that the command in `words` lacks; "" if none is
    missing.

    The client's dependencies are not checked.
    """
    has_executor = any(word.startswith("--executor") for word in words)
    for extra, (commands, packages) in _EXTRAS.items():
        for package in packages:
            if words[0] in commands and not importlib.util.find_spec(package):
                is_embedded = words[0] in _WITH_MODEL and not has_executor
                return requires_extra("torch" if is_embedded else extra, package)
    return ""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="penstock",
        description="A gRPC streaming service for LLM inference.",
    )
    parser.add_argument(
        "--version", action="version", version=f"penstock {version_of('penstock') or 'unknown'}"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    for command, command_parser in zip(_COMMANDS, subparsers.choices.values(), strict=True):
        command_parser.set_defaults(parser=command_parser, run=command.run)
    return parser
