"""`penstock timeline`: converts a flight record to a Perfetto trace and prints a summary."""

import argparse
import contextlib
import gzip
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import UsageError, run_reporting
from penstock.server.cli.report import printable

if TYPE_CHECKING:
    from penstock.server.observe.flight.reader import Recording

_EXIT_CODES = """\
exit codes:
  0    done
  2    bad usage, or a file that is not a flight record
  5    a file could not be read or written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C
  141  the reader of the output has exited
"""
_SUFFIX = ".json.gz"


def add_parser(subparsers: Subparsers) -> None:
    """Add `timeline` to the command line."""
    parser = subparsers.add_parser(
        "timeline",
        help="convert a flight record to a timeline of steps and requests",
        description="Convert a flight record to a trace for ui.perfetto.dev and\n"
        "chrome://tracing: tracks for slots, steps, the queue, KV blocks. See docs/timeline.md.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("file", metavar="FILE", help="a flight record; - for standard input")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="the trace, compressed if it ends in .gz; - for standard output"
        f" (default: FILE with {_SUFFIX}; none for standard input)",
    )
    parser.add_argument("--last", type=int, metavar="N", help="include only the last N steps")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("timeline", lambda: _timeline(args))


def _timeline(args: argparse.Namespace) -> int:
    from penstock.server.observe.flight.timeline import timeline_json
    from penstock.tools.timeline.summary import summary_lines

    if args.last is not None and args.last < 1:
        raise UsageError(f"--last must be at least 1, not {args.last}")
    recording = _recording(args.file)
    output: str | None = args.output
    if output is None and args.file != "-":
        output = str(Path(args.file).with_suffix(_SUFFIX))
    if output is not None:
        with _opened(output) as file:
            for piece in timeline_json(recording, num_steps=args.last):
                file.write(piece)
    # If the trace is written to standard output, the summary is written to standard error.
    summary_file = sys.stderr if output == "-" else sys.stdout
    for line in summary_lines(recording, num_steps=args.last):
        print(printable(line), file=summary_file)
    if output is not None and output != "-":
        print(f"timeline     {output}: open it in https://ui.perfetto.dev", file=summary_file)
    return ExitCode.OK


def _recording(source: str) -> "Recording":
    from penstock.server.observe.flight.layout import FlightError
    from penstock.server.observe.flight.reader import FlightReader

    name = "standard input" if source == "-" else source
    try:
        reader = FlightReader(sys.stdin.buffer.read() if source == "-" else Path(source))
        return reader.recording()
    except FlightError as error:
        raise UsageError(f"{name}: {error}") from error


@contextlib.contextmanager
def _opened(output: str) -> Generator[IO[bytes], None, None]:
    if output == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # The trace contains request and tenant ids, so, like the recording, it is readable only by its
    # owner.
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        if not output.endswith(".gz"):
            yield file
            return
        with gzip.GzipFile(filename="", fileobj=file, mode="wb") as compressed:
            yield cast("IO[bytes]", compressed)
