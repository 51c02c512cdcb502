"""`penstock simulate`: a trace through the production scheduler, in virtual time.

Owns the flags, the progress line and where the report goes. What is simulated and measured is the
simulation package's.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.server.cli.command import Subparsers
from penstock.server.cli.connection import UsageError, run_reporting, seconds
from penstock.server.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.simulation.settings import SimulationConfig
    from penstock.server.simulation.simulate import Progress
    from penstock.server.simulation.trace import TraceRequest
    from penstock.server.simulation.transform import TransformConfig

T = TypeVar("T")

_EXIT_CODES = """\
exit codes:
  0    every request of the trace ended
  2    bad usage, a trace or step file that is not of its format, or a limit that cannot hold
  5    a file could not be read or written
  130  interrupted by Ctrl-C; no report was written
  141  nobody reads the output any more
"""
_POLICIES = ("fcfs", "fair", "static", "dynamic")
_FORMATS = ("azure", "mooncake", "recorded")


def add_parser(subparsers: Subparsers) -> None:
    """Add `simulate` to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace through the scheduler in virtual time",
        description="Replay a trace through the production scheduler over a simulated device:\n"
        "hours of traffic in seconds. See docs/simulation.md.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_trace_options(parser)
    _add_server_options(parser)
    report = parser.add_argument_group("report")
    report.add_argument("--report", type=Path, metavar="DIR", help="write JSON, CSV and HTML here")
    report.add_argument(
        "--png",
        action=argparse.BooleanOptionalAction,
        help="PNG plots in the report (default: where matplotlib is installed)",
    )
    report.add_argument("--json", action="store_true", help="print JSON instead of the table")
    report.add_argument("--no-progress", action="store_true", help="no progress line on stderr")
    parser.set_defaults(run=run)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("trace")
    source = trace.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace, also compressed (.gz)")
    source.add_argument(
        "--synthetic", metavar="JSON", help="a made-up trace; the fields of SyntheticConfig"
    )
    trace.add_argument("--format", choices=_FORMATS, help="default: told by the first line")
    trace.add_argument(
        "--load", type=float, default=1.0, metavar="X", help="arrivals X times faster"
    )
    trace.add_argument("--start-s", type=float, default=0.0, metavar="S", help="leave out before")
    trace.add_argument("--end-s", type=float, default=math.inf, metavar="S", help="leave out after")
    trace.add_argument("--max-requests", type=int, metavar="N", help="of the window, the first N")
    trace.add_argument("--max-prompt-tokens", type=int, metavar="N", help="cut prompts to N")
    trace.add_argument("--max-output-tokens", type=int, metavar="N", help="cut outputs to N")
    trace.add_argument(
        "--tenants",
        metavar="NAME=SHARE,...",
        help="give the requests to these tenants, by their shares",
    )
    trace.add_argument("--ttft-deadline-s", type=seconds, default=math.inf, metavar="S")
    trace.add_argument("--deadline-s", type=seconds, default=math.inf, metavar="S")
    trace.add_argument(
        "--deadline-share", type=float, default=1.0, metavar="X", help="part that has the deadlines"
    )
    trace.add_argument("--seed", type=int, default=0, metavar="N", help="of tenants and deadlines")


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--policy", choices=_POLICIES, default="fair", help="default: %(default)s")
    server.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    server.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    server.add_argument("--num-blocks", type=int, default=16_384, metavar="N")
    server.add_argument("--block-size", type=int, default=16, metavar="N")
    server.add_argument("--max-seq-len", type=int, default=262_144, metavar="N")
    server.add_argument(
        "--scheduler", metavar="JSON", help="further fields of SchedulerConfig, all but the order"
    )
    server.add_argument("--batch-size", type=int, metavar="N", help="of static and dynamic batches")
    server.add_argument(
        "--batch-wait-s", type=float, default=0.5, metavar="S", help="dynamic: for a batch to fill"
    )
    server.add_argument("--no-prefix-caching", action="store_true")
    server.add_argument("--target-ttft-s", type=seconds, default=1.0, metavar="S")
    server.add_argument("--target-itl-ms", type=seconds, default=100.0, metavar="MS")
    cost = server.add_mutually_exclusive_group()
    cost.add_argument("--cost", metavar="JSON", help="the cost model: seconds, by name of field")
    cost.add_argument(
        "--calibrate-from",
        type=Path,
        metavar="FILE",
        help="fit the cost model to measured steps; without a trace, print it and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    return run_reporting("simulate", lambda: _simulate(args))


def _simulate(args: argparse.Namespace) -> int:
    from penstock.server.simulation.calibration import CalibrationError
    from penstock.server.simulation.trace import TraceError

    try:
        cost = _cost_of(args)
        if args.trace is None and args.synthetic is None:
            if args.calibrate_from is None:
                raise UsageError("--trace, --synthetic or --calibrate-from must be given")
            return ExitCode.OK
        config, transform = _config_of(args, cost), _transform_of(args)
        return _replay(args, _trace_of(args), config, transform)
    except (TraceError, CalibrationError) as error:
        raise UsageError(str(error)) from error


def _replay(
    args: argparse.Namespace,
    trace: "Iterator[TraceRequest]",
    config: "SimulationConfig",
    transform: "TransformConfig",
) -> int:
    from penstock.server.simulation.png_plots import PlotsUnavailable, has_matplotlib, write_png
    from penstock.server.simulation.report import summary_json, summary_lines, write_report
    from penstock.server.simulation.simulate import simulate
    from penstock.server.simulation.summary import summarise
    from penstock.server.simulation.transform import transformed

    if args.png and not has_matplotlib():
        raise UsageError("--png: needs matplotlib: install penstock[plots]")
    if args.png and args.report is None:
        raise UsageError("--png: needs --report")
    line = _ProgressLine(is_shown=not args.no_progress)
    try:
        result = simulate(transformed(trace, transform), config, line.show)
    finally:
        line.end()
    summary = summarise(result)
    if args.json:
        print(summary_json(result, summary))
    else:
        print("\n".join(summary_lines(summary)))
        print(
            f"simulated    {summary.num_steps:,} steps in {result.wall_s:.1f} s"
            f" ({result.cpu_s:.1f} s of one core)"
        )
    if args.report is not None:
        charts = write_report(result, summary, args.report)
        if args.png or (args.png is None and has_matplotlib()):
            try:
                write_png(charts, args.report)
            except PlotsUnavailable as error:
                raise UsageError(str(error)) from error
        print(f"penstock simulate: report in {args.report}", file=sys.stderr)
    return ExitCode.OK


class _ProgressLine:
    """One line on stderr that is written over, in a terminal; nothing elsewhere."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(self, progress: "Progress") -> None:
        """Write the line anew."""
        if not self._is_shown:
            return
        minutes, rest_s = divmod(int(progress.now_s), 60)
        speed = progress.now_s / progress.wall_s if progress.wall_s else 0.0
        print(
            f"\r\x1b[K{minutes // 60}:{minutes % 60:02}:{rest_s:02} simulated, {speed:,.0f}x;"
            f" {progress.num_ended:,} of {progress.num_arrived:,} ended,"
            f" {progress.num_running:,} running, {progress.num_waiting:,} waiting",
            end="",
            file=sys.stderr,
            flush=True,
        )
        self._has_shown = True

    def end(self) -> None:
        """Leave the line."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)


def _cost_of(args: argparse.Namespace) -> "CostModel":
    from penstock.executor.config_json import to_json_value
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.simulation.calibration import calibrate

    if args.calibrate_from is None:
        return _from_json("--cost", CostModel, args.cost)
    fit = calibrate(args.calibrate_from)
    is_all = args.trace is None and args.synthetic is None
    print(
        f"fitted to {fit.num_steps:,} steps: R2 {fit.r_squared:.4f},"
        f" mean error {fit.mean_error:.1%} of the mean step",
        file=sys.stderr,
    )
    print(json.dumps(to_json_value(fit.cost)), file=sys.stdout if is_all else sys.stderr)
    return fit.cost


def _config_of(args: argparse.Namespace, cost: "CostModel") -> "SimulationConfig":
    from penstock.scheduler.config import SchedulerConfig
    from penstock.server.simulation.settings import (
        UNBOUNDED_QUEUE,
        Policy,
        SimulationConfig,
        Targets,
    )

    extra = _object("--scheduler", args.scheduler)
    if "order" in extra:
        raise UsageError("--scheduler: order is decided by --policy")
    queue = {
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_waiting": UNBOUNDED_QUEUE.max_num_waiting,
        "max_num_waiting_tokens": UNBOUNDED_QUEUE.max_num_waiting_tokens,
    }
    scheduler = _from_json("--scheduler", SchedulerConfig, json.dumps({**queue, **extra}))
    try:
        return SimulationConfig(
            policy=Policy(args.policy),
            cost=cost,
            targets=Targets(ttft_s=args.target_ttft_s, itl_s=args.target_itl_ms / 1e3),
            max_num_seqs=args.max_num_seqs,
            num_blocks=args.num_blocks,
            block_size=args.block_size,
            max_seq_len=args.max_seq_len,
            scheduler=scheduler,
            batch_size=args.batch_size,
            batch_wait_s=args.batch_wait_s,
            has_prefix_caching=not args.no_prefix_caching,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _transform_of(args: argparse.Namespace) -> "TransformConfig":
    from penstock.server.simulation.synthetic import TenantShare
    from penstock.server.simulation.transform import TransformConfig

    try:
        tenants = tuple(
            TenantShare(name=name, share=float(share) if is_pair else 1.0)
            for name, is_pair, share in (
                part.partition("=") for part in (args.tenants or "").split(",") if part
            )
        )
    except ValueError as error:
        raise UsageError(f"--tenants: must be NAME=SHARE,...: {error}") from error
    try:
        return TransformConfig(
            load=args.load,
            start_s=args.start_s,
            end_s=args.end_s,
            max_requests=args.max_requests,
            max_prompt_tokens=args.max_prompt_tokens,
            max_output_tokens=args.max_output_tokens,
            tenants=tenants,
            ttft_deadline_s=args.ttft_deadline_s,
            deadline_s=args.deadline_s,
            deadline_share=args.deadline_share,
            seed=args.seed,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _trace_of(args: argparse.Namespace) -> "Iterator[TraceRequest]":
    from penstock.server.simulation.synthetic import SyntheticConfig, synthetic_trace
    from penstock.server.simulation.trace_files import read_trace
    from penstock.server.simulation.trace_formats import TraceFormat

    if args.trace is not None:
        return read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    return synthetic_trace(_from_json("--synthetic", SyntheticConfig, args.synthetic))


def _from_json(option: str, kind: type[T], text: str | None) -> T:
    from penstock.executor.config_json import from_json_value

    try:
        return from_json_value(kind, _object(option, text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {error}") from error


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{option}: must be a JSON object")
    return cast("dict[str, Any]", values)
