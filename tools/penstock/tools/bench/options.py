"""The flags of `penstock bench`, and the plans that they describe.

Owns the reading of flags and the conversion of a trace to rows. Sends nothing.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.server.cli.connection import UsageError, positive_number, seconds
from penstock.server.cli.connection_options import refuse_connection_options, sender_options
from penstock.tools.simulation.options import (
    add_settings,
    flag_of,
    read_settings,
    sources_of,
)

if TYPE_CHECKING:
    from penstock.client import Model
    from penstock.server.observe.recording.trace import TraceRequest
    from penstock.server.settings.sources import Sources
    from penstock.tools.bench.plan import LoadPlan
    from penstock.tools.bench.sender import SenderConfig

T = TypeVar("T")

MAX_POINTS = 64
_NO_POINT = {"rate_per_s": None, "concurrency": None}
_OF_TRACES = ("format", "load", "start_s", "max_prompt_tokens", "max_output_tokens")
_OF_MADE_UP = ("prompt_tokens", "output_tokens")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the service under load and the connections to it."""
    from penstock.tools.bench.plan import LoadPlan
    from penstock.tools.bench.sender import SenderConfig

    group = parser.add_argument_group("service")
    group.add_argument(
        "--own-service",
        action="store_true",
        help="start a new service, with the options of `penstock serve` after --",
    )
    group.add_argument(
        "--start-timeout-s",
        type=seconds,
        default=600.0,
        metavar="S",
        help="with --own-service: time limit of its start (default: %(default)g)",
    )
    group.add_argument(
        "--allow-remote",
        action="store_true",
        help="permit load on another machine; without it, only on this one",
    )
    group.add_argument(
        "--multiplex", action="store_true", help="all requests of a connection on one stream"
    )
    group.add_argument(
        "--processes", type=int, default=1, metavar="N", help="client processes (default: 1)"
    )
    add_settings(group, SenderConfig)
    add_settings(group, LoadPlan, ["service"])


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for arrivals, lengths and duration."""
    from penstock.tools.bench.plan import LoadPlan
    from penstock.tools.simulation.trace_formats import TraceFormat

    group = parser.add_argument_group("load")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--rates",
        type=_list_of(positive_number),
        metavar="R,...",
        help="open loop: requests per second; one run for each",
    )
    how.add_argument(
        "--concurrency",
        type=_list_of(int),
        metavar="N,...",
        help="closed loop: concurrent requests; one run for each",
    )
    group.add_argument(
        "--arrivals", choices=("poisson", "constant"), help="with --rates (default: poisson)"
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="LENGTHS",
        help="N, uniform:MIN:MAX or lognormal:MEAN:SIGMA:MAX (default: 128)",
    )
    group.add_argument("--output-tokens", metavar="LENGTHS", help="same format (default: 64)")
    add_settings(group, LoadPlan, ["load"])
    trace = parser.add_argument_group(
        "trace", "replayed at its own times, or with --rates or --concurrency for its lengths alone"
    )
    trace.add_argument("--trace", type=Path, metavar="FILE", help="a trace, also compressed (.gz)")
    trace.add_argument(
        "--format",
        choices=[one.value for one in TraceFormat],
        help="default: detected from the first line",
    )
    trace.add_argument("--load", type=float, metavar="X", help="arrivals X times faster")
    trace.add_argument("--start-s", type=float, metavar="S", help="skip the first S seconds")
    trace.add_argument("--max-prompt-tokens", type=int, metavar="N", help="cut prompts to N")
    trace.add_argument("--max-output-tokens", type=int, metavar="N", help="cut outputs to N")
    targets = parser.add_argument_group("targets of a good request")
    add_settings(targets, LoadPlan, ["targets"])


def _list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    def values(text: str) -> list[T]:
        try:
            found = [read(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers with commas, not {text!r}") from None
        if len(found) > MAX_POINTS:
            raise argparse.ArgumentTypeError(f"must be at most {MAX_POINTS} numbers")
        return found

    return values


def check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that exclude each other, before anything is started."""
    _check_source(args)
    if args.arrivals is not None and args.rates is None:
        raise UsageError("--arrivals requires --rates")
    for option, path in (("--json", args.json), ("--report", args.report)):
        # Checked now: after the load, the figures would be lost.
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option}: folder {path.parent} does not exist")
    if len(args.rest) > 1 and not args.own_service:
        raise UsageError(f"{args.rest[1]}: options of serve require --own-service and go after --")


def _check_source(args: argparse.Namespace) -> None:
    has_points = args.rates is not None or args.concurrency is not None
    if args.trace is None:
        if not has_points:
            raise UsageError("--rates, --concurrency or --trace must be given")
        needless: tuple[str, ...] = _OF_TRACES
        reason = "requires --trace"
    else:
        needless = _OF_MADE_UP
        reason = "cannot be combined with --trace, which has the lengths"
        if args.load is not None and has_points:
            raise UsageError("--load cannot be combined with --rates or --concurrency")
    for name in needless:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def sender_of(args: argparse.Namespace, address: str) -> "SenderConfig":
    """The target. Raises UsageError, also for another machine without --allow-remote."""
    from penstock.tools.bench.sender import SenderConfig, is_local

    if args.own_service:
        refuse_connection_options(args, "--own-service: the options of serve go after --")
    try:
        options: dict[str, Any] = {} if args.own_service else sender_options(args)
        derived = {"address": address, "is_multiplex": args.multiplex, **options}
        config = read_settings(args, SenderConfig, derived)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (args.allow_remote or is_local(address)):
        raise UsageError(
            f"{address} is not this machine; add --allow-remote to send load to another"
        )
    return config


def plans_of(args: argparse.Namespace, model: "Model", seed: int) -> "list[LoadPlan]":
    """One plan for each point. `seed`: used if none is given.

    Raises UsageError, BadSetting, TraceError, OSError.
    """
    from penstock.tools.bench.plan import Arrivals, LoadPlan

    if model.limits.vocab_size is None:
        raise UsageError(f"{model.name} has no vocabulary size")
    sources = sources_of(args, LoadPlan)
    rows = _rows(args, sources)
    arrivals = Arrivals(args.arrivals or "poisson")
    points: list[dict[str, Any]]
    if args.rates is not None:
        points = [{"arrivals": arrivals, "rate_per_s": rate} for rate in args.rates]
    elif args.concurrency is not None:
        points = [{"arrivals": Arrivals.CLOSED, "concurrency": num} for num in args.concurrency]
    else:
        points = [{"arrivals": Arrivals.REPLAY}]
    common = {
        "vocab_size": model.limits.vocab_size,
        "rows": rows,
        "prompt_tokens": _lengths("--prompt-tokens", args.prompt_tokens or "128"),
        "output_tokens": _lengths("--output-tokens", args.output_tokens or "64"),
        "seed": sources.get("seed", seed),
    }
    plans = [
        sources.build(LoadPlan, {**_NO_POINT, **common, **point, "run_index": index})
        for index, point in enumerate(points)
    ]
    _check_limits(plans[0], model)
    return plans


def _check_limits(plan: "LoadPlan", model: "Model") -> None:
    """Raise UsageError for lengths that the model would refuse."""
    for what, most, limit in (
        ("a prompt", plan.max_prompt_tokens, model.limits.max_prompt_tokens),
        ("an output", plan.max_output_tokens, model.limits.max_output_tokens),
        ("a prompt and its output", plan.max_total_tokens, model.limits.max_total_tokens),
    ):
        if limit is not None and most > limit:
            raise UsageError(
                f"{what} may have {most:,} tokens; {model.name} accepts at most {limit:,}"
            )


def _lengths(option: str, text: str) -> Any:
    from penstock.tools.bench.lengths import parse_lengths

    try:
        return parse_lengths(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _rows(args: argparse.Namespace, sources: "Sources") -> "tuple[TraceRequest, ...]":
    """The rows of the trace that the run can use."""
    from penstock.scheduler.setting import SettingError
    from penstock.tools.bench.plan import MAX_ROWS
    from penstock.tools.simulation.trace_files import read_trace
    from penstock.tools.simulation.trace_formats import TraceFormat
    from penstock.tools.simulation.transform import TransformConfig, transformed

    if args.trace is None:
        return ()
    trace = read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    try:
        config = TransformConfig(
            load=1.0 if args.load is None else args.load,
            start_s=args.start_s or 0.0,
            max_prompt_tokens=args.max_prompt_tokens,
            max_output_tokens=args.max_output_tokens,
        )
        rows = tuple(itertools.islice(_wanted(args, sources, transformed(trace, config)), MAX_ROWS))
    except SettingError as error:
        raise UsageError(error.spelled(flag_of)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not rows:
        raise UsageError("the trace has no requests after --start-s")
    return rows


def _wanted(
    args: argparse.Namespace, sources: "Sources", trace: "Iterator[TraceRequest]"
) -> "Iterator[TraceRequest]":
    end_s = sources.value("warm_up_s") + sources.value("duration_s")
    is_replay = args.rates is None and args.concurrency is None
    for request in trace:
        if is_replay and request.arrival_s >= end_s:
            return
        is_named = args.tenant_metadata_key and not args.tenant
        yield request if is_named else dataclasses.replace(request, tenant="")
