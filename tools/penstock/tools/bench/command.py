"""`penstock bench`: generates load for a service and reports measurements.

Connects to a service or starts one, executes one run for each rate or concurrency (or one that
replays a trace), and writes the report. `options` defines the flags, `report` the report.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Parser, Subparsers, until_signal
from penstock.server.cli.connection import (
    connection_error,
    default_address_source,
    run_reporting,
)
from penstock.server.cli.connection_options import add_connection_options
from penstock.tools.bench.options import (
    TRACE_CHANGES,
    add_load_options,
    add_target_options,
    check_options,
    plans_for,
    plans_of,
    sender_of,
    trace_changes,
)
from penstock.tools.own_service import OwnService, ServiceFailed
from penstock.tools.progress_line import ProgressLine

if TYPE_CHECKING:
    from penstock.client import Model
    from penstock.tools.bench.fleet import Fleet, LoadRun
    from penstock.tools.bench.pipe import WorkerProgress
    from penstock.tools.bench.plan import BenchOptions, LoadPlan
    from penstock.tools.bench.sender import SenderConfig

_EXIT_CODES = """\
exit codes:
  0    the load was sent and measured; failed requests are part of the figures
  1    no counted request completed, a process of the load generator died, or the started service
       did not stop cleanly
  2    bad usage: includes a remote address without --allow-remote and a missing extra `bench`
  3    no service at the address, or the started service did not start
  4    the service did not answer in time
  5    a file could not be read or written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C (143: SIGTERM); open requests were cancelled, no report was written
  141  the reader of the output has exited
"""
_INTERRUPTED = "penstock bench: interrupted"
_STOP_TIMEOUT_S = 120.0
_BAR_CHARS = 24


def add_parser(subparsers: Subparsers) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="generate load for a service and measure its performance",
        description="Generate load for a service and measure it at the client:\n\n"
        "  penstock bench 127.0.0.1:50051 --rates 1,2,4,8 --report out/\n"
        "  penstock bench --own-service --concurrency 64 -- --executor simulated\n\n"
        "See docs/bench.md.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "rest",
        nargs="*",
        metavar="ADDRESS",
        help="HOST[:PORT] of the service (default: as for the other commands);"
        " with --own-service: the options of `penstock serve`, after --",
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    add_connection_options(parser)
    add_target_options(parser)
    add_load_options(parser)
    report = parser.add_argument_group("report")
    report.add_argument("--json", type=Path, metavar="FILE", help="write settings and figures")
    report.add_argument("--report", type=Path, metavar="DIR", help="write JSON and one HTML page")
    report.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("bench", lambda: asyncio.run(until_signal(_bench(args), _INTERRUPTED)))


async def _bench(args: argparse.Namespace) -> int:
    from penstock.tools.bench.fleet import FleetFailed

    options = check_options(args)
    args.address, args.address_source = (
        (args.rest[0], "ADDRESS") if args.rest else default_address_source(os.environ)
    )
    # The address of an own service is known only after its start.
    sender = sender_of(args, "localhost" if args.own_service else args.address)
    plans = plans_of(args, options, secrets.randbelow(2**32))
    try:
        if args.own_service:
            return await _with_own_service(args, options, sender, plans)
        return await _measure(args, options, sender, plans)
    except FleetFailed as error:
        print(f"penstock bench: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILED


async def _with_own_service(
    args: argparse.Namespace,
    options: "BenchOptions",
    sender: "SenderConfig",
    plans: "list[LoadPlan]",
) -> int:
    service = OwnService(
        args.rest,
        start_timeout_s=options.start_timeout_s,
        stop_timeout_s=_STOP_TIMEOUT_S,
        # Containers are configured by their environment, so the service under test reads it too.
        environment=os.environ,
    )
    try:
        async with service:
            sender = dataclasses.replace(sender, address=service.address)
            return await _measure(args, options, sender, plans)
    except ServiceFailed as failure:
        print(f"penstock bench: {failure}", file=sys.stderr, flush=True)
        return ExitCode.UNAVAILABLE if service.start_s is None else ExitCode.FAILED


async def _measure(
    args: argparse.Namespace,
    options: "BenchOptions",
    sender: "SenderConfig",
    plans: "list[LoadPlan]",
) -> int:
    from penstock.tools.bench.fleet import Fleet

    model = await _model_at(args, sender)
    plans = plans_for(model, plans)
    async with Fleet(sender, options.num_processes) as fleet:
        runs = await _run_all(args, fleet, plans)
    return _report(args, sender, model, runs)


async def _model_at(args: argparse.Namespace, sender: "SenderConfig") -> "Model":
    from penstock.client import Client

    try:
        client = Client(sender.address, **sender.client_options())
    except (ValueError, OSError) as error:
        raise connection_error(args, error) from error
    async with client:
        return await client.get_model(args.model)


async def _run_all(
    args: argparse.Namespace, fleet: "Fleet", plans: "list[LoadPlan]"
) -> "list[LoadRun]":
    from penstock.tools.bench.report import point_text

    line = ProgressLine(is_shown=not args.no_progress)
    runs: list[LoadRun] = []
    try:
        for number, plan in enumerate(plans, 1):
            heading = "" if len(plans) == 1 else f"{number}/{len(plans)} {point_text(plan)} "

            def show(
                executed: "LoadPlan",
                now_s: float,
                progress: "WorkerProgress",
                heading: str = heading,
            ) -> None:
                line.show(bar_text(heading, executed, now_s, progress))

            runs.append(await fleet.run(plan, show))
    finally:
        line.end()
    return runs


def _report(
    args: argparse.Namespace, sender: "SenderConfig", model: "Model", runs: "list[LoadRun]"
) -> int:
    from penstock.tools.bench.figures import figures_of, warnings_of
    from penstock.tools.bench.report import (
        document_of,
        figure_lines,
        point_text,
        sweep_lines,
        write_page,
    )

    figures = [figures_of(run) for run in runs]
    lines = figure_lines(figures[0]) if len(runs) == 1 else sweep_lines(figures)
    print("\n".join([*lines, f"seed         {runs[0].plan.seed}"]), flush=True)
    for one in figures:
        for warning in warnings_of(one):
            where = "" if len(runs) == 1 else f"{point_text(one)}: "
            print(f"penstock bench: warning: {where}{warning}", file=sys.stderr, flush=True)
    document = document_of(sender, model, runs, figures)
    document["settings"]["trace"] = _trace_settings(args)
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    if args.report is not None:
        args.report.mkdir(parents=True, exist_ok=True)
        (args.report / "bench.json").write_text(text, encoding="utf-8")
        write_page(args.report / "bench.html", document, runs, figures)
        print(f"penstock bench: report in {args.report}", file=sys.stderr, flush=True)
    return ExitCode.OK if any(one.num_completed for one in figures) else ExitCode.FAILED


def _trace_settings(args: argparse.Namespace) -> dict[str, object] | None:
    """Return the settings of the trace for the report: its file name without the folder, and the
    values of the fields named in `TRACE_CHANGES`. None if no trace is used.
    """
    if args.trace is None:
        return None
    changes = trace_changes(args)
    return {"file": args.trace.name, **{name: getattr(changes, name) for name in TRACE_CHANGES}}


def bar_text(heading: str, plan: "LoadPlan", now_s: float, progress: "WorkerProgress") -> str:
    """Return the text of the progress line, which begins with `heading`. `now_s`: seconds since the
    start of the run.
    """
    now_s = max(0.0, now_s)
    share = min(1.0, now_s / plan.end_s)
    bar = "#" * round(share * _BAR_CHARS)
    num_open = progress.num_sent - progress.num_ended
    if plan.is_warm_up or now_s < plan.start_s:
        phase = "warm-up"
    elif now_s < plan.end_s:
        phase = "measuring"
    else:
        phase = "draining"
    return (
        f"{heading}[{bar:.<{_BAR_CHARS}}] {min(now_s, plan.end_s):.0f}/{plan.end_s:g} s {phase}:"
        f" {progress.num_sent:,} sent, {num_open:,} open, {progress.num_failed:,} failed"
    )
