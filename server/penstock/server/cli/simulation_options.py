"""Flags that name a trace and a simulated server, and what they mean.

Owns the reading of them for every command that simulates. What is simulated is the simulation
package's, and is imported when a command runs.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.server.cli.connection import UsageError, seconds

if TYPE_CHECKING:
    from penstock.scheduler.cost_model import CostModel
    from penstock.server.simulation.settings import SimulationConfig
    from penstock.server.simulation.trace import TraceRequest
    from penstock.server.simulation.transform import TransformConfig

T = TypeVar("T")

_POLICIES = ("fcfs", "fair", "static", "dynamic")
_FORMATS = ("azure", "mooncake", "recorded")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a trace and of what is done to it."""
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


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of one server, without its targets."""
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
    server.add_argument(
        "--front-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="part of TTFT and E2E outside the engine: fronts, network (default: %(default)s)",
    )
    cost = server.add_mutually_exclusive_group()
    cost.add_argument(
        "--cost", metavar="JSON|FILE", help="the cost model: seconds, by name of field"
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
    from penstock.server.cli.step_prices import read_step_prices
    from penstock.server.simulation.calibration import calibrate

    if args.calibrate_from is None:
        try:
            return CostModel() if args.cost is None else read_step_prices("--cost", args.cost)
        except ValueError as error:
            raise UsageError(str(error)) from error
    fit = calibrate(args.calibrate_from)
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


def config_of(args: argparse.Namespace, cost: "CostModel") -> "SimulationConfig":
    """One server. Raises UsageError."""
    from penstock.scheduler.config import SchedulerConfig
    from penstock.server.simulation.settings import (
        UNBOUNDED_QUEUE,
        Policy,
        SimulationConfig,
        Targets,
    )

    extra = json_object("--scheduler", args.scheduler)
    if "order" in extra:
        raise UsageError("--scheduler: order is decided by --policy")
    queue = {
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_waiting": UNBOUNDED_QUEUE.max_num_waiting,
        "max_num_waiting_tokens": UNBOUNDED_QUEUE.max_num_waiting_tokens,
    }
    scheduler = from_json("--scheduler", SchedulerConfig, json.dumps({**queue, **extra}))
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
            front_s=args.front_ms / 1e3,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def transform_of(args: argparse.Namespace) -> "TransformConfig":
    """What is done to the trace. Raises UsageError."""
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


def trace_of(args: argparse.Namespace) -> "Iterator[TraceRequest]":
    """The trace that is named, read while it is taken. Raises UsageError."""
    from penstock.server.simulation.synthetic import SyntheticConfig, synthetic_trace
    from penstock.server.simulation.trace_files import read_trace
    from penstock.server.simulation.trace_formats import TraceFormat

    if args.trace is not None:
        return read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    return synthetic_trace(from_json("--synthetic", SyntheticConfig, args.synthetic))


def from_json(option: str, kind: type[T], text: str | None) -> T:
    """A value from JSON, its defaults where nothing is given. Raises UsageError."""
    from penstock.executor.config_json import from_json_value

    try:
        return from_json_value(kind, json_object(option, text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {error}") from error


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object, empty where nothing is given. Raises UsageError."""
    if text is None:
        return {}
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{option}: must be a JSON object")
    return cast("dict[str, Any]", values)
