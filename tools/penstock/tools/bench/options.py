"""Defines the flags of `penstock bench`, and converts them to plans."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.cli.connection import UsageError, connection_error
from penstock.server.cli.connection_options import reject_connection_options, sender_options
from penstock.tools.flags import add_settings, flag_of, read_settings, sources_of
from penstock.tools.output_paths import check_output_file, check_report_folder

if TYPE_CHECKING:
    from penstock.client import Model
    from penstock.server.observe.recording.trace import TraceRequest
    from penstock.server.settings.sources import Sources
    from penstock.tools.bench.plan import BenchOptions, LoadPlan
    from penstock.tools.bench.sender import SenderConfig
    from penstock.tools.simulation.transform import TransformConfig

TRACE_CHANGES = ("load", "start_s", "max_prompt_tokens", "max_output_tokens")
"""Settings of TransformConfig (changes to a trace) that are also flags of bench."""
_LENGTH_FLAGS = ("prompt_tokens", "output_tokens")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the service under load and the connections to it."""
    from penstock.tools.bench.plan import BenchOptions, LoadPlan
    from penstock.tools.bench.sender import SenderConfig

    group = parser.add_argument_group("service")
    group.add_argument(
        "--own-service",
        action="store_true",
        help="start a new service, with the options of `penstock serve` after --",
    )
    group.add_argument(
        "--allow-remote",
        action="store_true",
        help="allow a service on another machine",
    )
    group.add_argument(
        "--multiplex",
        action="store_true",
        help="send all requests of a connection on one stream (Multiplex)",
    )
    add_settings(group, BenchOptions, ["service"])
    add_settings(group, SenderConfig)
    add_settings(group, LoadPlan, ["service"])


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for arrivals, lengths and duration."""
    from penstock.tools.bench.plan import BenchOptions, LoadPlan
    from penstock.tools.simulation.trace_formats import TraceFormat
    from penstock.tools.simulation.transform import TransformConfig

    group = parser.add_argument_group("load")
    add_settings(group.add_mutually_exclusive_group(), BenchOptions, ["points"])
    add_settings(group, BenchOptions, ["load"])
    add_settings(group, LoadPlan, ["load"])
    trace = parser.add_argument_group(
        "trace",
        "replayed with its arrival times; with --rates or --concurrency only its lengths are used",
    )
    trace.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace file, optionally compressed (.gz)"
    )
    trace.add_argument(
        "--format",
        choices=[one.value for one in TraceFormat],
        help="default: detected from the first line",
    )
    add_settings(trace, TransformConfig, TRACE_CHANGES)
    targets = parser.add_argument_group("targets of a good request")
    add_settings(targets, LoadPlan, ["targets"])


def check_options(args: argparse.Namespace) -> "BenchOptions":
    """Check the flags, and return the options common to all runs. Raises BadSetting for an invalid
    value; UsageError for flags that exclude or require each other, and for output paths that cannot
    be written.
    """
    from penstock.tools.bench.plan import BenchOptions

    options = read_settings(args, BenchOptions)
    _check_source(args)
    if args.arrivals is not None and args.rates is None:
        raise UsageError("--arrivals requires --rates")
    check_output_file("--json", args.json)
    check_report_folder(args.report, "bench")
    if len(args.rest) > 1 and not args.own_service:
        raise UsageError(f"{args.rest[1]}: options of serve require --own-service and go after --")
    return options


def _check_source(args: argparse.Namespace) -> None:
    has_points = args.rates is not None or args.concurrency is not None
    if args.trace is None:
        if not has_points:
            raise UsageError("--rates, --concurrency or --trace must be given")
        needless: tuple[str, ...] = ("format", *TRACE_CHANGES)
        reason = "requires --trace"
    else:
        needless = _LENGTH_FLAGS
        reason = "cannot be combined with --trace, which contains the lengths"
        if args.load is not None and has_points:
            raise UsageError("--load cannot be combined with --rates or --concurrency")
    for name in needless:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def sender_of(args: argparse.Namespace, address: str) -> "SenderConfig":
    """Return the settings of the connections to the service at `address`.

    Raises UsageError, for example for a remote machine without --allow-remote.
    """
    from penstock.tools.bench.sender import SenderConfig, is_local

    if args.own_service:
        reject_connection_options(args, "--own-service: the options of serve go after --")
    try:
        options: dict[str, Any] = {} if args.own_service else sender_options(args)
        derived = {"address": address, "is_multiplex": args.multiplex, **options}
        config = read_settings(args, SenderConfig, derived)
    except ValueError as error:
        raise connection_error(args, error) from error
    if not (args.allow_remote or is_local(address)):
        raise UsageError(
            f"{address} is not this machine; add --allow-remote to send load to another"
        )
    return config


def plans_of(args: argparse.Namespace, options: "BenchOptions", seed: int) -> "list[LoadPlan]":
    """Return one plan per rate or concurrency, or one plan that replays the trace. Their vocabulary
    size is a placeholder; `plans_for` replaces it.

    `seed`: used if the flags give none. Raises UsageError for invalid flags or an invalid trace,
    BadSetting for an invalid setting, and OSError if the trace cannot be read.
    """
    from penstock.tools.bench.plan import Arrivals, LoadPlan

    sources = sources_of(args, LoadPlan)
    rows = _rows(args, sources)
    points: list[dict[str, Any]] = [
        *({"arrivals": options.arrivals, "rate_per_s": rate} for rate in options.rates),
        *({"arrivals": Arrivals.CLOSED, "concurrency": num} for num in options.concurrency),
    ] or [{"arrivals": Arrivals.REPLAY}]
    common = {
        "vocab_size": 1,
        "rows": rows,
        "prompt_tokens": _lengths("--prompt-tokens", options.prompt_tokens),
        "output_tokens": _lengths("--output-tokens", options.output_tokens),
        "seed": sources.get("seed", seed),
    }
    return [
        sources.build(LoadPlan, {**common, **point, "run_index": index})
        for index, point in enumerate(points)
    ]


def plans_for(model: "Model", plans: "list[LoadPlan]") -> "list[LoadPlan]":
    """Return the plans with the model's vocabulary size. Raises UsageError if the model publishes
    none, or if requests of the plans may exceed the model's length limits.
    """
    if model.limits.vocab_size is None:
        raise UsageError(f"{model.name} has no vocabulary size")
    plan = plans[0]
    prompts, outputs = "--prompt-tokens", "--output-tokens"
    if plan.rows:
        prompts, outputs = "--max-prompt-tokens", "--max-output-tokens"
    for flag, what, most, limit in (
        (prompts, "a prompt", plan.max_prompt_tokens, model.limits.max_prompt_tokens),
        (outputs, "an output", plan.max_output_tokens, model.limits.max_output_tokens),
        (
            f"{prompts}, {outputs}",
            "a prompt and its output",
            plan.max_total_tokens,
            model.limits.max_total_tokens,
        ),
    ):
        if limit is not None and most > limit:
            raise UsageError(
                f"{flag}: {what} may have {most:,} tokens; {model.name} accepts at most {limit:,}"
            )
    return [dataclasses.replace(plan, vocab_size=model.limits.vocab_size) for plan in plans]


def _lengths(option: str, text: str) -> Any:
    from penstock.tools.bench.lengths import parse_lengths

    try:
        return parse_lengths(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _rows(args: argparse.Namespace, sources: "Sources") -> "tuple[TraceRequest, ...]":
    """Return the requests of the trace, at most MAX_ROWS, with the flags' changes applied; for a
    replay, only requests that arrive before the end of the run. Their tenants are kept only if
    --tenant-metadata-key is given without --tenant. Empty without a trace. Raises UsageError for an
    invalid flag or trace or if no request is left, and OSError if the trace cannot be read.
    """
    from penstock.scheduler.setting import SettingError
    from penstock.tools.bench.plan import MAX_ROWS
    from penstock.tools.simulation.trace_files import read_trace
    from penstock.tools.simulation.trace_formats import TraceFormat
    from penstock.tools.simulation.transform import transformed

    if args.trace is None:
        return ()
    trace = read_trace(args.trace, TraceFormat(args.format) if args.format else None)
    try:
        changed = transformed(trace, trace_changes(args))
        rows = tuple(itertools.islice(_wanted(args, sources, changed), MAX_ROWS))
    except SettingError as error:
        raise UsageError(error.spelled(flag_of)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not rows:
        raise UsageError("the trace has no requests after --start-s")
    return rows


def trace_changes(args: argparse.Namespace) -> "TransformConfig":
    """Return the changes to the trace that the flags set. Raises BadSetting."""
    from penstock.tools.simulation.transform import TransformConfig

    return read_settings(args, TransformConfig, names=TRACE_CHANGES)


def _wanted(
    args: argparse.Namespace, sources: "Sources", trace: "Iterator[TraceRequest]"
) -> "Iterator[TraceRequest]":
    import msgspec

    end_s = sources.value("warm_up_s") + sources.value("duration_s")
    is_replay = args.rates is None and args.concurrency is None
    for request in trace:
        if is_replay and request.arrival_s >= end_s:
            return
        is_named = args.tenant_metadata_key and not args.tenant
        yield request if is_named else msgspec.structs.replace(request, tenant="")
