"""`penstock chat`: a chat, one line of stdin for each turn.

Owns the history. Works at a terminal and in a pipe: in a pipe there is no prompt sign, and the
first failure ends it.
"""

import argparse
import importlib
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import UsageError, describe_error, run_reporting, with_flags
from penstock.server.cli.connection_options import connect
from penstock.server.cli.generation_options import add_generation_options, options_of
from penstock.server.cli.report import summary_line, write_text

if TYPE_CHECKING:
    from penstock.client import ChatMessage, PenstockError, SyncClient

QUIT = "/quit"
RESET = "/reset"
_COMMANDS = f"{RESET} clears the chat, {QUIT} leaves"


def add_parser(subparsers: Subparsers) -> None:
    """Add `chat` to the command line."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model, turn by turn",
        description="Talk to a model; each line is a turn.\n\n"
        f"  {RESET}  clears the chat\n"
        f"  {QUIT}   leaves, as does the end of input\n\n"
        "At a terminal, Ctrl-C during an answer cancels the answer and drops the turn; at the\n"
        "prompt it leaves.",
    )
    add_generation_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument(
        "--stats", action="store_true", help="one line of figures on stderr after each answer"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("chat", lambda: _chat(args))


def _chat(args: argparse.Namespace) -> int:
    from penstock.client import ChatMessage, PenstockError

    is_terminal = sys.stdin.isatty()
    opening = [ChatMessage("system", args.system)] if args.system else []
    history = list(opening)
    with connect(args) as client:
        if is_terminal:
            client.health()  # an unreachable service is reported before the first line is typed
            print(_COMMANDS, file=sys.stderr, flush=True)
        while (line := _read_line(is_terminal)) is not None:
            if line == RESET:
                history = list(opening)
            elif line.startswith("/"):
                print(f"{line}: no such command; {_COMMANDS}", file=sys.stderr, flush=True)
            elif line:
                turn = ChatMessage("user", line)
                try:
                    answer = _answer(client, [*history, turn], args)
                except (KeyboardInterrupt, PenstockError) as error:
                    if not is_terminal:
                        raise
                    line = _failure_line(error, has_history=history != opening)
                    print(line, file=sys.stderr, flush=True)
                else:
                    history += [turn, ChatMessage("assistant", answer)]
    return ExitCode.OK


def _failure_line(error: "KeyboardInterrupt | PenstockError", *, has_history: bool) -> str:
    """Return the failure, with advice if the chat has filled the model's context."""
    from penstock.client import PromptTooLong

    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    line = f"penstock chat: {describe_error(error)}"
    if has_history and isinstance(error, PromptTooLong):
        line += f"; {RESET} clears the chat"
    return line


def _read_line(is_terminal: bool) -> str | None:
    """Read the next turn without surrounding white space; return None at the end of input."""
    if is_terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # which enables line editing in `input`
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


def _answer(client: "SyncClient", messages: "list[ChatMessage]", args: argparse.Namespace) -> str:
    """Stream the answer to stdout; return its text."""
    from penstock.client import Finished, Tokens

    try:
        events = client.chat(messages, deadline_s=args.deadline, **options_of(args))
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from error
    pieces: list[str] = []
    with closing(events):
        try:
            for event in events:
                if isinstance(event, Tokens) and event.text:
                    pieces.append(event.text)
                    write_text(event.text)
                elif isinstance(event, Finished) and args.stats:
                    print(f"\n{summary_line(event)}", file=sys.stderr, end="", flush=True)
        finally:
            write_text("\n")
    return "".join(pieces)
