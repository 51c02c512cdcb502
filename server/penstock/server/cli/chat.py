"""`penstock chat`: holds a conversation with a model, and reads one line of stdin per user message.

Keeps the history of the conversation. Works on a terminal and in a pipe; in a pipe it prints no
prompt, and ends at the first failure.
"""

import argparse
import asyncio
import importlib
import sys
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import UsageError, describe_error, run_reporting, with_flags
from penstock.server.cli.connection_options import connect_for_streams
from penstock.server.cli.generation_options import add_generation_options, options_of
from penstock.server.cli.report import summary_line, write_text

if TYPE_CHECKING:
    from penstock.client import ChatMessage, Client, PenstockError

QUIT = "/quit"
RESET = "/reset"
_HELP = "/help"
_COMMANDS = f"{RESET} clears the chat, {QUIT} exits"


def add_parser(subparsers: Subparsers) -> None:
    """Add the `chat` subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help="have a conversation with a model",
        description="Have a conversation with a model. Each line of input is one message.\n\n"
        f"  {RESET}  clears the chat\n"
        f"  {QUIT}   exits; the end of input does so too\n\n"
        "On a terminal, Ctrl-C during an answer cancels the answer and removes the message;\n"
        "at the prompt it exits.",
    )
    add_generation_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument(
        "--stats", action="store_true", help="one line of figures on stderr after each answer"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_reporting("chat", lambda: _chat(args))


def _chat(args: argparse.Namespace) -> int:
    # The event loop runs only during calls: at the prompt, Ctrl-C must interrupt `input`.
    with asyncio.Runner() as runner:
        client = runner.run(_connected(args))
        try:
            return _converse(runner, client, args)
        finally:
            runner.run(client.close())


async def _connected(args: argparse.Namespace) -> "Client":
    return connect_for_streams(args)


def _converse(runner: asyncio.Runner, client: "Client", args: argparse.Namespace) -> int:
    from penstock.client import ChatMessage, PenstockError

    is_terminal = sys.stdin.isatty()
    opening = [ChatMessage("system", args.system)] if args.system else []
    history = list(opening)
    # Report an unreachable service before the first line is read.
    runner.run(client.health())
    if is_terminal:
        print(_COMMANDS, file=sys.stderr, flush=True)
    while (line := _read_line(is_terminal)) is not None:
        if line == RESET:
            history = list(opening)
        elif line == _HELP:
            print(_COMMANDS, file=sys.stderr, flush=True)
        elif line.startswith("/"):
            print(f"{line}: no such command; {_COMMANDS}", file=sys.stderr, flush=True)
        elif line:
            turn = ChatMessage("user", line)
            try:
                answer = runner.run(_answer(client, [*history, turn], args))
            except (KeyboardInterrupt, PenstockError) as error:
                if not is_terminal:
                    raise
                line = _failure_line(error, has_history=history != opening)
                print(line, file=sys.stderr, flush=True)
            else:
                history += [turn, ChatMessage("assistant", answer)]
    return ExitCode.OK


def _failure_line(error: "KeyboardInterrupt | PenstockError", *, has_history: bool) -> str:
    """Return the error line, with advice if the conversation no longer fits into the model's
    context."""
    from penstock.client import PromptTooLong

    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    line = f"penstock chat: {describe_error(error)}"
    if has_history and isinstance(error, PromptTooLong):
        line += f"; {RESET} clears the chat"
    return line


def _read_line(is_terminal: bool) -> str | None:
    """Read the next message without surrounding whitespace; return None for `/quit` and at the end
    of input."""
    if is_terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # The import enables line editing in `input`.
        try:
            line = input("> ")
        except EOFError:
            print(flush=True)
            return None
    else:
        line = sys.stdin.readline()
        if not line:
            return None
    line = line.strip()
    return None if line == QUIT else line


async def _answer(client: "Client", messages: "list[ChatMessage]", args: argparse.Namespace) -> str:
    """Stream the answer to stdout and return its text. Raises UsageError for an invalid option, and
    PenstockError."""
    from penstock.client import Finished, Tokens

    try:
        events = client.chat(messages, deadline_s=args.deadline, **options_of(args))
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from error
    pieces: list[str] = []
    async with aclosing(events):
        try:
            async for event in events:
                if isinstance(event, Tokens) and event.text:
                    pieces.append(event.text)
                    write_text(event.text)
                elif isinstance(event, Finished) and args.stats:
                    print(f"\n{summary_line(event)}", file=sys.stderr, end="", flush=True)
        finally:
            write_text("\n")
    return "".join(pieces)
