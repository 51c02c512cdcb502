"""`penstock top`: queries a service at the operations port, and displays a live view of it.

Contains the command, its keys and its refresh. `top_state.py` holds the state, and `top_view.py`
draws it.
"""

import argparse
import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Generator
from typing import TYPE_CHECKING, TextIO

from penstock.conventions.extras import requires_extra
from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import (
    UsageError,
    add_operations_option,
    connection_error,
    describe_error,
    run_reporting,
    seconds,
)
from penstock.server.cli.connection_options import (
    add_connection_options,
    client_options,
    read_connection_options,
)
from penstock.server.cli.report import plain
from penstock.server.cli.top_state import MAX_REQUESTS, SORT_KEYS, TopState

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.client import SyncOperationsClient

DEFAULT_INTERVAL_S = 1.0
_LIVE_DEADLINE_S = 2.0
"""Time limit of a query of the live view, in seconds, after which the service is considered
unresponsive. Keys are not handled during a query."""
_ONCE_DEADLINE_S = 10.0
"""Time limit of a query of `--once`, in seconds: the client's default (`CONTROL_DEADLINE_S`)."""
_NO_WIDTH = 10_000
"""Unlimited width, for output that is not a terminal."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the `top` subcommand."""
    parser = subparsers.add_parser(
        "top",
        help="monitor a service: requests, tokens, latency, the KV cache",
        description="Monitor a service. Keys: q quits, s sorts. Needs the package rich.",
    )
    add_operations_option(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--interval",
        type=seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"refresh interval (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument("--sort", choices=tuple(SORT_KEYS), default="age", help="default: age")
    parser.add_argument("--once", action="store_true", help="print one frame to stdout and exit")
    parser.add_argument("--json", action="store_true", help="with --once: as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_reporting("top", lambda: _top(args))


def _top(args: argparse.Namespace) -> int:
    if args.json and not args.once:
        raise UsageError("--json requires --once")
    if not args.once and not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal; use --once to write one frame")
    console = None if args.json else _console()
    state = TopState(args.address, sort_key=args.sort)
    with _connect(args) as client:
        if args.once:
            _query(client, state, _ONCE_DEADLINE_S)
            if console is None:
                print(_json(state))
            else:
                _print_frame(console, state)
            return ExitCode.OK
        assert console is not None
        return _watch(console, client, state, args.interval)


def _connect(args: argparse.Namespace) -> "SyncOperationsClient":
    from penstock.client import NO_RETRY, ChannelConfig, SyncOperationsClient

    try:
        # The command polls anyway, so a query must not wait for an unreachable service.
        channel = ChannelConfig(
            max_reconnect_backoff_s=DEFAULT_INTERVAL_S,
            server_name=read_connection_options(args).server_name,
        )
        return SyncOperationsClient(
            args.address, retry=NO_RETRY, channel=channel, **client_options(args)
        )
    except (ValueError, OSError) as error:
        raise connection_error(args, error) from error


def _console() -> "Console":
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise UsageError(f"{requires_extra('top', 'rich')}; or use --once --json") from None
    if sys.stdout.isatty():
        return Console()
    width = os.environ.get("COLUMNS", "")
    return Console(width=int(width) if width.isdecimal() and int(width) else _NO_WIDTH)


def _query(client: "SyncOperationsClient", state: TopState, deadline_s: float) -> None:
    """Query the service once and store the response in `state`. Raises PenstockError."""
    stats = client.get_stats(deadline_s=deadline_s)
    requests = client.list_requests(max_requests=MAX_REQUESTS, deadline_s=deadline_s)
    state.update(stats, requests)


def _watch(
    console: "Console", client: "SyncOperationsClient", state: TopState, interval_s: float
) -> int:
    from rich.live import Live

    from penstock.client import PenstockError
    from penstock.server.cli.top_view import frame_of

    live = Live(console=console, screen=True, auto_refresh=False)
    with _keys(sys.stdin) as can_type, live, contextlib.suppress(KeyboardInterrupt):
        while True:
            begun_s = time.monotonic()
            try:
                _query(client, state, _LIVE_DEADLINE_S)
            except PenstockError as error:
                state.record_failure(describe_error(error))
            # Keys are read until the next refresh.
            while True:
                size = console.size
                frame = frame_of(state, width=size.width, height=size.height)
                live.update(frame, refresh=True)
                key = _key(max(0.0, begun_s + interval_s - time.monotonic()), can_type)
                if key in ("q", "Q", "\x1b"):
                    return ExitCode.OK
                if key in ("s", "S"):
                    state.sort_by_next()
                if not key:
                    break
    return ExitCode.OK


def _print_frame(console: "Console", state: TopState) -> None:
    from penstock.server.cli.top_view import frame_of

    width = None if console.width == _NO_WIDTH else console.width
    console.print(frame_of(state, width=width))


def _json(state: TopState) -> str:
    assert state.stats is not None
    requests = [plain(request) for request in state.sorted_requests]
    return json.dumps({"stats": plain(state.stats), "requests": requests})


@contextlib.contextmanager
def _keys(terminal: TextIO) -> Generator[bool]:
    """Switch `terminal` to unbuffered input (cbreak mode) while the context is active, and yield
    True. Yields False if `terminal` is not a terminal."""
    if not terminal.isatty():
        yield False
        return
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield True
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key(timeout_s: float, can_type: bool) -> str:
    """Return the next key; "" if none was typed in time, "q" at the end of the input."""
    sources = [sys.stdin.fileno()] if can_type else []
    ready, _, _ = select.select(sources, [], [], timeout_s)
    if not ready:
        return ""
    # Bypasses Python's buffer, which is invisible to select. The end of input is treated as q.
    return os.read(sys.stdin.fileno(), 1).decode("utf-8", "replace") or "q"
