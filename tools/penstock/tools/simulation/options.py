"""Adds and reads the flags that `simulate` and `plan` share: flags of traces and simulated servers.

Most flags are generated from the settings of the simulation. The simulation package is imported
only when a command runs.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.server.cli.connection import UsageError
from penstock.tools.flags import add_settings, flag_of, read_settings, sources_of

if TYPE_CHECKING:
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.observe.recording.trace import TraceRequest
    from penstock.tools.simulation.calibration import Calibration
    from penstock.tools.simulation.routing import RouterKind, RoutingConfig
    from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
    from penstock.tools.simulation.transform import TransformConfig
    from penstock.tools.targets import Targets

T = TypeVar("T")

_BATCHES = {("static", "dynamic"): ("batch_size",), ("dynamic",): ("batch_wait_s",)}
"""For each set of batching policies, the settings that apply only to them."""
_ROUTING = {
    ("least_loaded", "prefix_aware"): ("load_signal", "load_signal_delay_s"),
    ("prefix_aware",): (
        *("overload_factor", "overload_slack", "min_prefix_share", "max_index_tokens"),
    ),
}
"""For each set of routers, the settings that apply only to them."""
_CACHE_FIELDS = (
    *("eviction", "session_ttl_s", "session_retention_level", "max_session_share"),
    "max_session_tokens",
)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a trace and of its transformations."""
    from penstock.tools.simulation.trace_formats import TraceFormat
    from penstock.tools.simulation.transform import TransformConfig

    trace = parser.add_argument_group("trace")
    source = trace.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace file, optionally compressed (.gz), or a flight record",
    )
    source.add_argument(
        "--synthetic",
        metavar="JSON",
        help="a synthetic trace: JSON object; docs/settings.md lists the keys",
    )
    trace.add_argument(
        "--format",
        choices=[one.value for one in TraceFormat],
        help="default: detected from the first line",
    )
    add_settings(trace, TransformConfig)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of one simulated server, except its latency targets."""
    from penstock.tools.simulation.settings import SimulationConfig

    server = parser.add_argument_group("server")
    add_settings(server, SimulationConfig, ["server", "max_num_batched_tokens"])
    server.add_argument(
        "--scheduler",
        metavar="JSON",
        help="scheduler settings: JSON object; docs/settings.md lists the keys",
    )
    server.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="disable the prefix cache",
    )
    cost = server.add_mutually_exclusive_group()
    add_settings(cost, SimulationConfig, ["cost"])
    cost.add_argument(
        "--calibrate-from",
        type=Path,
        metavar="FILE",
        help="fit the cost model to measured steps; without a trace, print it and exit",
    )


def add_routing_options(parser: argparse.ArgumentParser, *, has_replicas: bool) -> None:
    """Add the flags of the router and, with `has_replicas`, `--replicas`."""
    from penstock.tools.simulation.cluster import ClusterConfig
    from penstock.tools.simulation.routing import RoutingConfig

    group = parser.add_argument_group("routing across replicas")
    if has_replicas:
        add_settings(group, ClusterConfig, ["replicas"])
    add_settings(group, RoutingConfig)


def cost_of(args: argparse.Namespace) -> "CostModel":
    """Return the cost model of a step. Without --calibrate-from the flags give it. With
    --calibrate-from it is fitted to measured steps, and printed with its errors.

    Raises BadSetting, CalibrationError, UsageError, OSError.
    """
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.settings.json_values import to_json_value
    from penstock.tools.simulation.calibration import calibrate
    from penstock.tools.simulation.flight_trace import is_flight_file
    from penstock.tools.simulation.settings import SimulationConfig

    if args.calibrate_from is None:
        return cast("CostModel", sources_of(args, SimulationConfig).get("cost", CostModel()))
    path: Path = args.calibrate_from
    fit = calibrate_from_flight(path) if is_flight_file(path) else calibrate(path)
    is_all = args.trace is None and args.synthetic is None
    print(
        f"fitted to {fit.num_steps:,} steps: R2 {fit.r_squared:.4f},"
        f" mean error {fit.mean_error:.1%} of the mean step",
        file=sys.stderr,
    )
    if fit.num_left_out:
        print(
            f"left out {fit.num_left_out:,} steps that took far longer than such steps do,"
            f" {fit.left_out_share:.1%} of the time",
            file=sys.stderr,
        )
    print(json.dumps(to_json_value(fit.cost)), file=sys.stdout if is_all else sys.stderr)
    return fit.cost


def config_of(
    args: argparse.Namespace, cost: "CostModel", targets: "Targets | None" = None
) -> "SimulationConfig":
    """Return the settings of one simulated server. `targets` None: the targets given by the flags,
    or the default targets. Raises UsageError, BadSetting.
    """
    from penstock.tools.simulation.scheduler_keys import scheduler_of
    from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig

    extra = json_object("--scheduler", args.scheduler)
    if "order" in extra:
        raise UsageError("--scheduler: the order is set by --policy")
    if args.no_prefix_caching:
        for name in _CACHE_FIELDS:
            if name in extra:
                raise UsageError(f"--scheduler: {name} cannot be combined with --no-prefix-caching")
    sources = sources_of(args, SimulationConfig)
    num_step_tokens = sources.get("max_num_batched_tokens")
    if num_step_tokens is not None and "max_num_batched_tokens" in extra:
        raise UsageError("--scheduler: max_num_batched_tokens is given by its own flag too")
    derived: dict[str, Any] = {
        "policy": sources.get("policy", BatchingPolicy.FAIR),
        "cost": cost,
        "scheduler": scheduler_of(extra, num_step_tokens),
        "has_prefix_caching": not args.no_prefix_caching,
    }
    if targets is not None:
        derived["targets"] = targets
    return sources.build(SimulationConfig, derived)


def routing_of(args: argparse.Namespace) -> "RoutingConfig":
    """Read the routing settings from the flags. Raises BadSetting."""
    from penstock.tools.simulation.routing import RoutingConfig

    return read_settings(args, RoutingConfig)


def reject_batches_for_others(
    args: argparse.Namespace, policies: "Collection[BatchingPolicy]"
) -> None:
    """Raise UsageError for a batch flag that applies to none of the chosen policies."""
    _reject_for_others(args, _BATCHES, "policy", policies)


def reject_routing_for_others(args: argparse.Namespace, routers: "Collection[RouterKind]") -> None:
    """Raise UsageError for a routing flag that applies to none of the chosen routers."""
    _reject_for_others(args, _ROUTING, "router", routers)


def _reject_for_others(
    args: argparse.Namespace,
    takers: Mapping[tuple[str, ...], tuple[str, ...]],
    what: str,
    used: Collection[str],
) -> None:
    for meant_for, names in takers.items():
        for name in names:
            if getattr(args, name) is not None and not {*used} & {*meant_for}:
                raise UsageError(
                    f"{flag_of(name)} has no effect with the {what} {', '.join(sorted(used))}"
                )


def transform_of(args: argparse.Namespace) -> "TransformConfig":
    """Return the changes to the trace that the flags set. Raises UsageError, BadSetting."""
    from penstock.tools.simulation.synthetic import TenantShare
    from penstock.tools.simulation.trace_formats import check_unique
    from penstock.tools.simulation.transform import TransformConfig

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
        check_unique("--tenants", (tenant.name for tenant in tenants))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return read_settings(args, TransformConfig, {"tenants": tenants})


def trace_of(args: argparse.Namespace) -> "Iterator[TraceRequest]":
    """Return the requests of the trace that --trace or --synthetic gives. A trace file is read
    during the iteration; the iteration may raise TraceError or OSError. Raises UsageError, OSError.
    """
    from penstock.tools.simulation.flight_trace import is_flight_file
    from penstock.tools.simulation.synthetic import SyntheticConfig, synthetic_trace
    from penstock.tools.simulation.trace_files import read_trace
    from penstock.tools.simulation.trace_formats import TraceFormat

    if args.trace is not None and is_flight_file(args.trace):
        if args.format is not None:
            raise UsageError(f"--format: {args.trace} is a flight record, not {args.format}")
        return flight_trace_of(args.trace)
    if args.trace is not None:
        return read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    return synthetic_trace(from_json("--synthetic", SyntheticConfig, args.synthetic))


def from_json(option: str, kind: type[T], text: str | None) -> T:
    """Build an instance of `kind` from a JSON object; omitted fields have their defaults. `option`:
    the flag named in errors. Raises UsageError.
    """
    from penstock.server.settings.json_values import from_json_value

    values = json_object(option, text)
    try:
        return from_json_value(kind, values)
    except (TypeError, ValueError) as error:
        # The user knows the keys of the JSON, not the name of the class.
        reason = str(error).removeprefix(kind.__name__).lstrip(".: ")
        raise UsageError(f"{option}: {reason}") from error


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """Parse a JSON object; empty if `text` is None. `option`: the flag named in errors. Raises
    UsageError.
    """
    from penstock.server.settings.json_values import parse_json

    if text is None:
        return {}
    try:
        values: Any = parse_json(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise UsageError(f"{option}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{option}: must be a JSON object")
    return cast("dict[str, Any]", values)


def flight_trace_of(path: Path) -> "Iterator[TraceRequest]":
    """Return the requests of a flight record; print the numbers of returned and of omitted requests
    on stderr. Raises UsageError, OSError.
    """
    from penstock.server.observe.flight.layout import FlightError
    from penstock.tools.simulation.flight_trace import flight_trace

    try:
        trace = flight_trace(path)
    except FlightError as error:
        raise UsageError(f"{path}: {error}") from error
    print(
        f"{path}: a flight record of {len(trace.requests):,} requests,"
        f" {trace.num_left_out:,} left out; common prefixes of prompts are not recorded",
        file=sys.stderr,
    )
    return iter(trace.requests)


def calibrate_from_flight(path: Path) -> "Calibration":
    """Fit the cost model to the steps of a flight record. Raises UsageError, OSError."""
    from penstock.tools.simulation.calibration import fit_cost
    from penstock.tools.simulation.flight_trace import flight_steps

    try:
        return fit_cost(*flight_steps(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def add_report_options(parser: argparse.ArgumentParser, files: str) -> None:
    """Add the flags of the report; `files`: its file formats, for the help text."""
    report = parser.add_argument_group("report")
    report.add_argument("--report", type=Path, metavar="DIR", help=f"write {files} here")
    report.add_argument("--json", action="store_true", help="print JSON instead of the table")
    report.add_argument("--no-progress", action="store_true", help="do not show progress on stderr")
