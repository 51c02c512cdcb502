"""`penstock plan`: finds the replica settings and the number of replicas that a trace requires.

Contains the flags and the progress output. The module `plan` performs the search, `report` writes
the report.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Parser, Subparsers
from penstock.server.cli.connection import UsageError, run_reporting
from penstock.tools.flags import add_settings, flag_of, read_settings
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
    from penstock.tools.plan.candidates import Candidate
    from penstock.tools.plan.plan import Plan
    from penstock.tools.plan.target import ClusterResult, PlanTarget
    from penstock.tools.simulation.simulate import SimulationProgress

_EXIT_CODES = """\
exit codes:
  0    a candidate meets the target
  1    no candidate meets the target within --max-replicas; the report is written
  2    bad usage, an invalid trace or settings file, or an impossible limit
  5    a file could not be read or written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C; no report was written
  141  the reader of the output has exited
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="determine how many replicas of which settings a trace needs",
        description="Replay a trace on simulated replicas of each candidate and find the smallest\n"
        "number that meets the targets. See docs/planning.md.",
        epilog=_EXIT_CODES,
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    _add_target_options(parser)
    add_trace_options(parser)
    _add_candidate_options(parser)
    add_server_options(parser)
    add_routing_options(parser, has_replicas=False)
    add_report_options(parser, "JSON and HTML")


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    from penstock.tools.plan.plan import PlanSearch
    from penstock.tools.plan.target import PlanTarget

    target = parser.add_argument_group("target")
    add_settings(target, PlanTarget)
    add_settings(target, PlanSearch, ["target"])


def _add_candidate_options(parser: argparse.ArgumentParser) -> None:
    from penstock.tools.plan.candidates import Candidate
    from penstock.tools.plan.plan import PlanSearch

    group = parser.add_argument_group(
        "candidates", "omitted fields are taken from the flags of the server and of the routing"
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--settings", type=Path, metavar="FILE", help="candidates: a JSON array of objects"
    )
    which.add_argument(
        "--candidate",
        action="append",
        metavar="JSON",
        help='additional candidate, for example {"name": "big", "price": 4, "num_blocks": 65536}',
    )
    add_settings(group, Candidate, ["price"])
    add_settings(group, PlanSearch, ["curve"])


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("plan", lambda: _plan(args))


def _plan(args: argparse.Namespace) -> int:
    from penstock.server.observe.recording.trace import TraceError
    from penstock.tools.simulation.calibration import CalibrationError

    if args.trace is None and args.synthetic is None:
        raise UsageError("--trace or --synthetic must be given")
    check_report_folder(args.report, "tools")
    try:
        plan = _search(args)
    except (TraceError, CalibrationError) as error:
        raise UsageError(str(error)) from error
    _report(args, plan)
    return ExitCode.FAILED if plan.best is None else ExitCode.OK


def _search(args: argparse.Namespace) -> "Plan":
    from penstock.scheduler.setting import SettingError
    from penstock.tools.plan.plan import PlanSearch, make_plan
    from penstock.tools.plan.target import PlanTarget
    from penstock.tools.plan.window import busiest_window
    from penstock.tools.simulation.transform import transformed

    target, search = read_settings(args, PlanTarget), read_settings(args, PlanSearch)
    candidates = _candidates(args, target)
    reject_routing_for_others(args, {each.routing.router for each in candidates})
    reject_batches_for_others(args, {each.replica.policy for each in candidates})
    transform = transform_of(args)
    try:
        trace = list(transformed(trace_of(args), transform))
        if not trace:
            raise UsageError("the trace has no requests between --start-s and --end-s")
        window = busiest_window(trace, search.window_s)
    except SettingError as error:
        raise UsageError(error.spelled(flag_of)) from error
    watcher = _Watcher(is_shown=not args.no_progress)
    try:
        return make_plan(window, candidates, target, search, watcher.progress, watcher.tried)
    finally:
        watcher.line.end()


def _candidates(args: argparse.Namespace, target: "PlanTarget") -> "tuple[Candidate, ...]":
    from penstock.server.settings.json_values import parse_json
    from penstock.tools.plan.candidates import Candidate, candidates_from_json
    from penstock.tools.targets import Targets

    targets = Targets(ttft_s=target.ttft_p99_s, itl_s=target.itl_p99_s)
    replica = config_of(args, cost_of(args), targets)
    derived = {"name": "default", "replica": replica, "routing": routing_of(args)}
    base = read_settings(args, Candidate, derived, ["price"])
    option = "--candidate" if args.settings is None else str(args.settings)
    try:
        if args.settings is not None:
            return candidates_from_json(parse_json(args.settings.read_text("utf-8")), base)
        if args.candidate is not None:
            items = [_parsed(text, f"[{i}]") for i, text in enumerate(args.candidate)]
            return candidates_from_json(items, base)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    return (base,)


def _parsed(text: str, where: str) -> object:
    from penstock.server.settings.json_values import parse_json

    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _report(args: argparse.Namespace, plan: "Plan") -> None:
    from penstock.tools.plan.report import plan_json, plan_lines, write_plan_report

    print(plan_json(plan) if args.json else "\n".join(plan_lines(plan)))
    if args.report is None:
        return
    write_plan_report(plan, args.report)
    print(f"penstock plan: report in {args.report}", file=sys.stderr)


class _Watcher:
    """Displays the progress of a plan on stderr: a line that is overwritten, and one line per
    finished simulation.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self.line = ProgressLine(is_shown=is_shown)
        self._is_shown = is_shown

    def progress(self, what: str, progress: "SimulationProgress") -> None:
        """Show the progress of a running simulation; `what`: its display name."""
        self.line.heading = f"{what}: "
        self.line.show(progress.text)

    def tried(self, what: str, result: "ClusterResult") -> None:
        """Print the result of a finished simulation; `what`: its display name."""
        from penstock.tools.plan.report import result_text

        if self._is_shown:
            self.line.end()
            print(f"{what}: {result_text(result)}", file=sys.stderr, flush=True)
