"""Flags that name a trace and a simulated server, and what they mean.

Owns the reading of them for every command that simulates. What is simulated is the simulation
package's, and is imported when a command runs.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.server.cli.connection import UsageError, seconds
from penstock.server.cli.flag_names import flag_names
from penstock.tools.simulation.flight_replay import calibrate_from_flight, flight_trace_of

if TYPE_CHECKING:
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.recording.trace import TraceRequest
    from penstock.tools.simulation.settings import Policy, SimulationConfig
    from penstock.tools.simulation.transform import TransformConfig

T = TypeVar("T")

_POLICIES = ("fcfs", "fair", "static", "dynamic")
_FORMATS = ("azure", "mooncake", "recorded")
_BATCHES = {"batch_size": ("static", "dynamic"), "batch_wait_s": ("dynamic",)}
"""Flags that only some policies take."""
_CACHE_FIELDS = (
    "eviction",
    "session_ttl_s",
    "session_retention_priority",
    "max_session_share",
    "max_session_tokens",
)
_FIELDS = (
    *("load", "start_s", "end_s", "max_requests", "max_prompt_tokens", "max_output_tokens"),
    *("tenants", "ttft_deadline_s", "deadline_s", "deadline_share", "seed", "window_s"),
    *("max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size", "max_seq_len"),
    *("batch_size", "batch_wait_s", "load_signal", "load_signal_delay_s", "overload_factor"),
    *("overload_slack", "max_index_tokens", "min_prefix_share"),
)
_FLAGS = {
    **{name: f"--{name.replace('_', '-')}" for name in _FIELDS},
    "good_share": "--target-good-share",
    "ttft_p99_s": "--target-ttft-p99-s",
    "itl_p99_s": "--target-itl-p99-ms",
}
told_by_flag = flag_names(_FLAGS, before="^|at least |before ")
"""Not anywhere: fields of traces have some of the names, behind the name of a file."""


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a trace and of what is done to it."""
    trace = parser.add_argument_group("trace")
    source = trace.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace, also compressed (.gz), or a flight recording",
    )
    source.add_argument(
        "--synthetic", metavar="JSON", help="a made-up trace; the fields of SyntheticConfig"
    )
    trace.add_argument("--format", choices=_FORMATS, help="default: told by the first line")
    trace.add_argument(
        "--load",
        type=float,
        default=1.0,
        metavar="X",
        help="arrivals X times faster, 1e-6 to 1e6",
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


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of one server, without its targets."""
    server = parser.add_argument_group("server")
    server.add_argument("--policy", choices=_POLICIES, default="fair", help="default: %(default)s")
    server.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    server.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="default: 2048")
    server.add_argument("--num-blocks", type=int, default=16_384, metavar="N")
    server.add_argument("--block-size", type=int, default=16, metavar="N")
    server.add_argument("--max-seq-len", type=int, default=262_144, metavar="N")
    server.add_argument(
        "--scheduler", metavar="JSON", help="further fields of SchedulerConfig, all but the order"
    )
    server.add_argument("--batch-size", type=int, metavar="N", help="of static and dynamic batches")
    server.add_argument(
        "--batch-wait-s",
        type=float,
        metavar="S",
        help="dynamic: for a batch to fill (default: 0.5)",
    )
    server.add_argument("--no-prefix-caching", action="store_true")
    server.add_argument(
        "--front-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="part of TTFT and E2E outside the engine: fronts, network (default: %(default)s)",
    )
    cost = server.add_mutually_exclusive_group()
    cost.add_argument(
        "--cost",
        metavar="JSON|FILE",
        help="the cost model: all four prices, 0 to 3600 seconds each, by name of field",
    )
    cost.add_argument(
        "--calibrate-from",
        type=Path,
        metavar="FILE",
        help="fit the cost model to measured steps; without a trace, print it and stop",
    )


def cost_of(args: argparse.Namespace) -> "CostModel":
    """The prices of a step. Raises UsageError, CalibrationError, OSError."""
    from penstock.executor.config_json import to_json_value
    from penstock.scheduler.cost_model import CostModel
    from penstock.tools.simulation.calibration import calibrate
    from penstock.tools.simulation.flight_trace import is_flight_file

    if args.calibrate_from is None:
        try:
            return CostModel() if args.cost is None else _prices(args.cost)
        except ValueError as error:
            raise UsageError(str(error)) from error
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


def _prices(text: str) -> "CostModel":
    from penstock.server.cli.step_prices import read_step_prices

    return read_step_prices("--cost", text, needs_all=True)


def config_of(args: argparse.Namespace, cost: "CostModel") -> "SimulationConfig":
    """One server. Raises UsageError."""
    from penstock.scheduler.config import SchedulerConfig
    from penstock.tools.simulation.settings import (
        UNBOUNDED_QUEUE,
        Policy,
        SimulationConfig,
        Targets,
    )

    extra = json_object("--scheduler", args.scheduler)
    if "order" in extra:
        raise UsageError("--scheduler: order is decided by --policy")
    if args.no_prefix_caching:
        for name in _CACHE_FIELDS:
            if name in extra:
                raise UsageError(f"--scheduler: {name} means nothing with --no-prefix-caching")
    queue: dict[str, Any] = {
        "max_num_waiting": UNBOUNDED_QUEUE.max_num_waiting,
        "max_num_waiting_tokens": UNBOUNDED_QUEUE.max_num_waiting_tokens,
    }
    if args.max_num_batched_tokens is not None:
        if "max_num_batched_tokens" in extra:
            raise UsageError("--scheduler: max_num_batched_tokens is given by its own flag too")
        if args.max_num_batched_tokens < 1:
            raise UsageError("--max-num-batched-tokens must be at least 1")
        queue["max_num_batched_tokens"] = args.max_num_batched_tokens
    if not (math.isfinite(args.front_ms) and args.front_ms >= 0.0):
        raise UsageError(f"--front-ms must be finite and not negative, not {args.front_ms:g}")
    scheduler = _built("--scheduler", SchedulerConfig, {**queue, **extra})
    batches = {name: value for name in _BATCHES if (value := getattr(args, name)) is not None}
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
            has_prefix_caching=not args.no_prefix_caching,
            front_s=args.front_ms / 1e3,
            **batches,
        )
    except ValueError as error:
        raise UsageError(told_by_flag(str(error))) from error


def refuse_batches_for_others(args: argparse.Namespace, policies: "Collection[Policy]") -> None:
    """Raise UsageError for a flag of batches that none of these policies, which are used, takes."""
    for name, meant_for in _BATCHES.items():
        if getattr(args, name) is not None and not {p.value for p in policies} & {*meant_for}:
            used = ", ".join(sorted(policy.value for policy in policies))
            raise UsageError(f"{_FLAGS[name]} means nothing to the policy {used}")


def transform_of(args: argparse.Namespace) -> "TransformConfig":
    """What is done to the trace. Raises UsageError."""
    from penstock.tools.simulation.synthetic import TenantShare
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
        raise UsageError(told_by_flag(str(error))) from error


def trace_of(args: argparse.Namespace) -> "Iterator[TraceRequest]":
    """The trace that is named, read while it is taken. Raises UsageError."""
    from penstock.server.recording.trace_formats import TraceFormat
    from penstock.tools.simulation.flight_trace import is_flight_file
    from penstock.tools.simulation.synthetic import SyntheticConfig, synthetic_trace
    from penstock.tools.simulation.trace_files import read_trace

    if args.trace is not None and is_flight_file(args.trace):
        if args.format is not None:
            raise UsageError(f"--format: {args.trace} is a flight recording, not {args.format}")
        return flight_trace_of(args.trace)
    if args.trace is not None:
        return read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    return synthetic_trace(from_json("--synthetic", SyntheticConfig, args.synthetic))


def from_json(option: str, kind: type[T], text: str | None) -> T:
    """A value from JSON, its defaults where nothing is given. Raises UsageError."""
    return _built(option, kind, json_object(option, text))


def _built(option: str, kind: type[T], values: dict[str, Any]) -> T:
    from penstock.executor.config_json import from_json_value

    try:
        return from_json_value(kind, values)
    except (TypeError, ValueError) as error:
        # Whoever typed the JSON knows its keys, not our class.
        reason = str(error).removeprefix(kind.__name__).lstrip(".: ")
        raise UsageError(f"{option}: {reason}") from error


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object, empty where nothing is given. Raises UsageError."""
    from penstock.executor.config_json import parse_json

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
