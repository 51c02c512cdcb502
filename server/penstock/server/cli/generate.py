"""`penstock generate`: sends one request, and prints its text as it is generated and a summary
line.

The text is written to stdout and the summary to stderr, so that a pipe gets only the text.
"""

import argparse
import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import UsageError, run_reporting, with_flags
from penstock.server.cli.connection_options import connect_for_streams
from penstock.server.cli.generation_options import add_generation_options, options_of
from penstock.server.cli.report import event_json, summary_line, write_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.client import Event, Finished

STDIN = "-"


def add_parser(subparsers: Subparsers) -> None:
    """Add the `generate` subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generate text. Tokens go to stdout as they come; then one line with queue"
        " time, time to first token, speed and finish reason goes to stderr.",
    )
    parser.add_argument("prompt", help=f"the text to continue; {STDIN} reads it from stdin")
    add_generation_options(parser)
    parser.add_argument("--n", type=int, metavar="N", help="independent outputs (default: 1)")
    parser.add_argument(
        "--json", action="store_true", help="print every event as a line of JSON instead"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_reporting("generate", lambda: asyncio.run(_generate(args)))


async def _generate(args: argparse.Namespace) -> int:
    prompt: str = sys.stdin.read() if args.prompt == STDIN else args.prompt
    if not prompt:
        raise UsageError("prompt: must not be empty")
    async with connect_for_streams(args) as client:
        options = options_of(args)
        options["n"] = args.n
        try:
            events = client.generate(prompt, deadline_s=args.deadline, **options)
        except ValueError as error:
            raise UsageError(with_flags(str(error))) from error
        async with aclosing(events):
            if args.json:
                await _print_json(events)
            else:
                await _print_text(events, has_many=(args.n or 1) > 1)
    return ExitCode.OK


async def _print_json(events: "AsyncIterator[Event]") -> None:
    async for event in events:
        print(event_json(event), flush=True)


async def _print_text(events: "AsyncIterator[Event]", *, has_many: bool) -> None:
    """Print the text and the summary. With several outputs, each is printed completely at the
    end."""
    from penstock.client import Finished, Tokens

    texts: dict[int, str] = {}
    text_open = False
    finished: Finished | None = None
    try:
        async for event in events:
            if isinstance(event, Finished):
                finished = event
            elif isinstance(event, Tokens) and event.text:
                if has_many:
                    texts[event.output_index] = texts.get(event.output_index, "") + event.text
                else:
                    text_open = not event.text.endswith("\n")
                    write_text(event.text)
    finally:
        if text_open:
            write_text("\n")
    if finished is not None:
        if has_many:
            _print_outputs(texts, finished)
        print(summary_line(finished), file=sys.stderr, flush=True)


def _print_outputs(texts: dict[int, str], finished: "Finished") -> None:
    for end in finished.outputs:
        write_text(f"--- output {end.output_index} ({end.finish_reason.name.lower()})\n")
        text = texts.get(end.output_index, "")
        write_text(text if text.endswith("\n") else f"{text}\n")
