"""`penstock simulate`: replays a trace through the production scheduler, in virtual time.

Adds the flags, runs the simulation with one or several servers, shows the progress and writes the
report.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Parser, Subparsers
from penstock.server.cli.connection import UsageError, run_reporting
from penstock.tools.flags import add_settings, flag_of, sources_of
from penstock.tools.output_paths import check_report_folder
from penstock.tools.progress_line import ProgressLine
from penstock.tools.simulation.options import (
    add_report_options,
    add_routing_options,
    add_server_options,
    add_trace_options,
    config_of,
    cost_of,
    reject_batches_for_others,
    reject_routing_for_others,
    routing_of,
    trace_of,
    transform_of,
)

if TYPE_CHECKING:
    from penstock.server.observe.recording.trace import TraceRequest
    from penstock.tools.simulation.routing import RoutingConfig
    from penstock.tools.simulation.settings import SimulationConfig
    from penstock.tools.simulation.simulate import SimulationProgress, SimulationRun
    from penstock.tools.simulation.transform import TransformConfig

_MAX_ALL_BLOCKS = 2**26
_EXIT_CODES = """\
exit codes:
  0    every request of the trace ended
  2    bad usage, an invalid trace or step file, or an impossible limit
  5    a file could not be read or written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C; no report was written
  141  the reader of the output has exited
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `simulate` to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace through the scheduler in virtual time",
        description="Replay a trace through the production scheduler over a simulated device:\n"
        "hours of traffic in seconds. See docs/simulation.md.",
        epilog=_EXIT_CODES,
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    from penstock.tools.targets import Targets

    add_trace_options(parser)
    add_server_options(parser)
    add_settings(parser.add_argument_group("targets of a good request"), Targets)
    add_routing_options(parser, has_replicas=True)
    add_report_options(parser, "JSON, CSV and HTML")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("simulate", lambda: _simulate(args))


def _simulate(args: argparse.Namespace) -> int:
    from penstock.scheduler.setting import SettingError
    from penstock.server.observe.recording.trace import TraceError
    from penstock.tools.simulation.calibration import CalibrationError

    check_report_folder(args.report, "tools")
    try:
        cost = cost_of(args)
        if args.trace is None and args.synthetic is None:
            if args.calibrate_from is None:
                raise UsageError("--trace, --synthetic or --calibrate-from must be given")
            return ExitCode.OK
        config, transform = config_of(args, cost), transform_of(args)
        return _replay(args, trace_of(args), config, transform)
    except SettingError as error:
        raise UsageError(error.spelled(flag_of)) from error
    except (TraceError, CalibrationError) as error:
        raise UsageError(str(error)) from error


def _replay(
    args: argparse.Namespace,
    trace: "Iterator[TraceRequest]",
    config: "SimulationConfig",
    transform: "TransformConfig",
) -> int:
    from penstock.tools.simulation.cluster import ClusterConfig
    from penstock.tools.simulation.transform import transformed

    routing = routing_of(args)
    reject_routing_for_others(args, {routing.router})
    reject_batches_for_others(args, {config.policy})
    num_replicas: int = sources_of(args, ClusterConfig, ["replicas"]).value("replicas")
    if num_replicas * config.num_blocks > _MAX_ALL_BLOCKS:
        raise UsageError(f"--replicas x --num-blocks must be at most {_MAX_ALL_BLOCKS}")
    line = ProgressLine(is_shown=not args.no_progress)

    def show(progress: "SimulationProgress") -> None:
        line.show(progress.text)

    changed = transformed(trace, transform)
    try:
        if num_replicas == 1:
            result = _one_server(changed, config, show)
        else:
            result = _many_servers(changed, config, num_replicas, routing, show)
    finally:
        line.end()
    if args.json:
        print(result.json())
    else:
        print("\n".join(result.lines))
    if args.report is not None:
        result.write(args.report)
        print(f"penstock simulate: report in {args.report}", file=sys.stderr)
    return ExitCode.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunOutput:
    """The output of a run: text lines, a function that returns the JSON, and one that writes the
    report into a folder.
    """

    lines: list[str]
    json: "Callable[[], str]"
    write: "Callable[[Path], None]"


def _one_server(
    trace: "Iterator[TraceRequest]",
    config: "SimulationConfig",
    show: "Callable[[SimulationProgress], None]",
) -> _RunOutput:
    from penstock.tools.simulation.report import summary_json, summary_lines, write_report
    from penstock.tools.simulation.simulate import simulate
    from penstock.tools.simulation.summary import summarise

    run = simulate(trace, config, show)
    summary = summarise(run)
    return _RunOutput(
        lines=[*summary_lines(summary), _effort(run, summary.num_steps)],
        json=partial(summary_json, run, summary),
        write=partial(write_report, run, summary),
    )


def _many_servers(
    trace: "Iterator[TraceRequest]",
    config: "SimulationConfig",
    num_replicas: int,
    routing: "RoutingConfig",
    show: "Callable[[SimulationProgress], None]",
) -> _RunOutput:
    from penstock.tools.simulation.cluster import ClusterConfig, simulate_cluster
    from penstock.tools.simulation.cluster_report import (
        cluster_json,
        cluster_lines,
        summarise_cluster,
        write_cluster_report,
    )

    cluster = ClusterConfig(replica=config, num_replicas=num_replicas, routing=routing)
    run = simulate_cluster(trace, cluster, show)
    summary = summarise_cluster(run)
    return _RunOutput(
        lines=[*cluster_lines(run, summary), _effort(run.total, summary.total.num_steps)],
        json=partial(cluster_json, run, summary),
        write=partial(write_cluster_report, run, summary),
    )


def _effort(run: "SimulationRun", num_steps: int) -> str:
    return f"simulated    {num_steps:,} steps in {run.wall_s:.1f} s ({run.cpu_s:.1f} s of one core)"
