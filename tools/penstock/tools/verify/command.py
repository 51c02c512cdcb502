"""`penstock verify`: checks an installation end to end and writes a report.

Connects to a service or starts one, runs the checks with the client, stops the service if it was
started, and writes the report.
"""

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.scheduler.setting import setting
from penstock.server.cli.command import ExitCode, Parser, Subparsers, until_signal
from penstock.server.cli.connection import (
    UsageError,
    add_address_option,
    connection_error,
    describe_error,
    run_reporting,
)
from penstock.server.cli.connection_options import (
    add_connection_options,
    bare_channel,
    client_options,
    read_connection_options,
    reject_connection_options,
)
from penstock.tools.flags import add_settings, read_settings
from penstock.tools.output_paths import check_output_file
from penstock.tools.own_service import OwnService, ServiceFailed

if TYPE_CHECKING:
    from penstock.client import Client, Model
    from penstock.server.settings.sources import Sources
    from penstock.tools.verify.check_result import CheckResult
    from penstock.tools.verify.report import Report, StartedService
    from penstock.tools.verify.subject import Subject

_EXIT_CODES = """\
exit codes:
  0    everything that could be checked passed
  1    something failed
  2    could not run: bad usage, or the service did not start
  3    no service at the address
  5    the report could not be written
  130  interrupted by Ctrl-C (143: SIGTERM); the started service was stopped
"""
_INTERRUPTED = "penstock verify: interrupted"
_MIN_STOP_TIMEOUT_S = 120.0
_STOP_SLACK_S = 30.0
"""Seconds allowed for the stop of a service in addition to its own time limits."""
_HEARTBEAT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyLimits:
    """The concurrency of the checks under load, and the time limits of the checks and of a started
    service.
    """

    concurrency: int = setting(
        32, "verify", "number of concurrent streams in the checks under load", at_least=1
    )
    timeout_s: float = setting(
        900.0, "verify", "time limit of all checks together, seconds", above=0
    )
    start_timeout_s: float = setting(
        1800.0, "verify", "with --serve: start timeout, seconds", above=0
    )
    stop_timeout_s: float | None = setting(
        None,
        "verify",
        "with --serve: stop timeout, seconds",
        above=0,
        shown=f"the limits of its drain and its engine plus {_STOP_SLACK_S:g}, at least"
        f" {_MIN_STOP_TIMEOUT_S:g}",
    )


class CouldNotRun(Exception):
    """No service could be verified; the message contains the reason."""

    def __init__(self, reason: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def add_parser(subparsers: Subparsers) -> None:
    """Add `verify` to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="check an installation end to end and print a report",
        description="Check a service end to end with the Python client, and print a report. The\n"
        "service is a running one (--address) or a new one:\n\n"
        "  penstock verify --serve -- --executor trtllm --model /models/llama\n\n"
        "The JSON report contains versions, limits, outcomes and figures; no prompts except\n"
        "built-in ones, no host names, no environment variables, and no paths without\n"
        "--with-paths.",
        epilog=_EXIT_CODES,
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    add_address_option(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--serve",
        action="store_true",
        help="start a new service, with the options of `penstock serve` after --",
    )
    parser.add_argument("serve_args", nargs="*", metavar="SERVE_OPTION", help=argparse.SUPPRESS)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the full report to this file"
    )
    parser.add_argument("--with-paths", action="store_true", help="include paths in the report")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="CHECK", help="skip this check; repeatable"
    )
    add_settings(parser, VerifyLimits)


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("verify", lambda: asyncio.run(until_signal(_verify(args), _INTERRUPTED)))


async def _verify(args: argparse.Namespace) -> int:
    from penstock.server.cli.installation import collect_installation
    from penstock.tools.verify.all_checks import ALL_CHECKS
    from penstock.tools.verify.report import Report, heading_lines

    known = [check.name for check in ALL_CHECKS]
    unknown = [name for name in args.skip if name not in known]
    if unknown:
        raise UsageError(f"--skip: unknown check {', '.join(unknown)}; known: {', '.join(known)}")
    if args.serve:
        reject_connection_options(args, "--serve: the options of serve go after --")
    if args.serve_args and not args.serve:
        first = args.serve_args[0]
        reason = "options of serve require --serve and go after --"
        hint = "" if first.startswith("-") else f"; an address: --address {first}"
        raise UsageError(f"{first}: {reason}{hint}")
    check_output_file("--json", args.json)
    run = _Run(args)
    installation = await asyncio.to_thread(collect_installation)
    print("\n".join(heading_lines(installation)), flush=True)
    try:
        await run.verify()
    except CouldNotRun as reason:
        print(f"penstock verify: {reason}", file=sys.stderr, flush=True)
        return reason.exit_code
    report = Report(
        time_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        installation=installation,
        results=tuple(run.results),
        model={} if run.model is None else _model_facts(run.model),
        figures=run.figures,
        served=run.served,
    )
    _report(report, args)
    return ExitCode.OK if report.is_passed else ExitCode.FAILED


def _report(report: "Report", args: argparse.Namespace) -> None:
    from penstock.tools.verify.report import hidden_names, report_json, summary_lines

    print("\n".join(summary_lines(report)), flush=True)
    if args.json is not None:
        hidden = hidden_names("" if args.serve else args.address)
        text = report_json(report, has_paths=args.with_paths, hidden=hidden)
        args.json.write_text(text, encoding="utf-8")
        print(f"report written to {args.json}", file=sys.stderr, flush=True)


def _model_facts(model: "Model") -> dict[str, Any]:
    from penstock.server.cli.report import value_json

    facts: dict[str, Any] = json.loads(value_json(model, features=dict(model.features)))
    return facts


class _Run:
    """One verification run and its results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._limits = args, read_settings(args, VerifyLimits)
        self._subject: Subject | None = None
        self.results: list[CheckResult] = []
        self.served: StartedService | None = None

    @property
    def model(self) -> "Model | None":
        """The service's description of its model; None if it is not known."""
        return None if self._subject is None else self._subject.found_model

    @property
    def figures(self) -> dict[str, Any]:
        """The figures measured under load, by a label with the number of concurrent streams."""
        return {} if self._subject is None else self._subject.figures

    async def verify(self) -> None:
        """Run the checks on the running service or, with --serve, on a new one. Raises CouldNotRun
        if there is none; UsageError for invalid options of `serve`.
        """
        await self._check_vendor_source()
        if self._args.serve:
            await self._verify_own()
        else:
            await self._check(self._args.address, is_prefix_reuse_off=False)

    async def _check_vendor_source(self) -> None:
        """If TensorRT-LLM is installed, compare its source with the API recorded for its version,
        and add a result.
        """
        from penstock.executor.trtllm.source_check import check_installed

        began_s = time.monotonic()
        report = await asyncio.to_thread(check_installed)
        if report is not None:
            self._note(
                "tensorrt-llm-source",
                report.summary,
                time.monotonic() - began_s,
                is_ok=report.is_as_recorded,
            )

    async def _verify_own(self) -> None:
        from penstock.tools.verify.report import StartedService, shown_argument

        args = self._args
        settings = _read_serve_options(args.serve_args)
        shown = [shown_argument(one, has_paths=args.with_paths) for one in args.serve_args]
        print(" ".join(("starting: penstock serve", *shown)), flush=True)
        service = OwnService(
            args.serve_args,
            start_timeout_s=self._limits.start_timeout_s,
            stop_timeout_s=self._limits.stop_timeout_s or stop_timeout_s(settings),
            # Containers are configured by their environment, so the verified service reads it too.
            environment=os.environ,
        )
        try:
            async with AsyncExitStack() as stack:
                await _with_heartbeat(stack.enter_async_context(service))
                self._note("start", f"ready after {service.start_s or 0:.1f} s", service.start_s)
                # A failure to stop is a result like any other; the report is still written.
                is_reuse_off = not settings.get("prefix_caching", True)
                await _while_alive(
                    service, self._check(service.address, is_prefix_reuse_off=is_reuse_off)
                )
        except ServiceFailed as failure:
            if service.start_s is None:
                raise CouldNotRun(str(failure)) from failure
            print(f"penstock verify: {failure}", file=sys.stderr, flush=True)
        self._note_end(service)
        self.served = StartedService(
            arguments=tuple(args.serve_args),
            start_s=service.start_s,
            stop_s=service.stop_s,
            exit_code=service.exit_code,
            model_kind=_model_kind(settings.get("model", "demo")),
        )

    async def _check(self, address: str, *, is_prefix_reuse_off: bool) -> None:
        from penstock.client import NO_RETRY, ChannelConfig, Client
        from penstock.tools.verify.all_checks import ALL_CHECKS
        from penstock.tools.verify.crash_detector import CrashDetector
        from penstock.tools.verify.runner import run_checks
        from penstock.tools.verify.subject import Subject

        try:
            # A retry would hide failures.
            options, server_name = {}, None
            if not self._args.serve:
                options = client_options(self._args)
                server_name = read_connection_options(self._args).server_name
            channel = ChannelConfig(server_name=server_name)
            client = Client(address, retry=NO_RETRY, channel=channel, **options)
        except (ValueError, OSError) as error:
            raise CouldNotRun(str(connection_error(self._args, error))) from error
        async with client:
            await _require_service(client)
            subject = Subject(
                client=client,
                address=address,
                open_channel=bare_channel(address, options, server_name),
                concurrency=self._limits.concurrency,
                is_prefix_reuse_off=is_prefix_reuse_off,
            )
            self._subject = subject
            await run_checks(
                subject,
                ALL_CHECKS,
                timeout_s=self._limits.timeout_s,
                left_out=frozenset(self._args.skip),
                on_result=self._on_result,
                crash_detector=CrashDetector(subject),
            )

    def _on_result(self, result: "CheckResult") -> None:
        from penstock.tools.verify.report import result_line

        self.results.append(result)
        print(result_line(result, has_paths=self._args.with_paths), flush=True)

    def _note(
        self, name: str, reason: str, duration_s: float | None, *, is_ok: bool = True
    ) -> None:
        from penstock.tools.verify.check_result import CheckOutcome, CheckResult

        outcome = CheckOutcome.PASS if is_ok else CheckOutcome.FAIL
        self._on_result(
            CheckResult(name=name, outcome=outcome, reason=reason, duration_s=duration_s or 0.0)
        )

    def _note_end(self, service: OwnService) -> None:
        code, stop_s = service.exit_code, service.stop_s
        if stop_s is None:
            reason = f"ended by itself with exit code {code}"
        else:
            reason = f"SIGTERM: exit code {code} after {stop_s:.1f} s"
        self._note("stop", reason, stop_s, is_ok=code == 0 and stop_s is not None)


async def _require_service(client: "Client") -> None:
    """Raise CouldNotRun if no service responds at the address."""
    from penstock.client import DeadlineExceeded, PenstockError, Unavailable

    try:
        await client.health()
    except (Unavailable, DeadlineExceeded) as error:
        raise CouldNotRun(describe_error(error), ExitCode.UNAVAILABLE) from error
    except PenstockError:
        # The service responds; the checks report its errors.
        return


async def _while_alive(service: OwnService, checks: Coroutine[Any, Any, None]) -> None:
    """Await the checks; cancel them if the service exits first."""
    checking = asyncio.ensure_future(checks)
    gone = asyncio.ensure_future(service.wait_until_gone())
    try:
        await asyncio.wait((checking, gone), return_when=asyncio.FIRST_COMPLETED)
        if checking.done():
            await checking
    finally:
        for task in (checking, gone):
            task.cancel()
        await asyncio.gather(checking, gone, return_exceptions=True)


async def _with_heartbeat(start: Any) -> None:
    """Await the start of the service; print the time waited on stderr every 10 s."""
    task = asyncio.ensure_future(start)
    started_s = time.monotonic()
    try:
        while not (await asyncio.wait((task,), timeout=_HEARTBEAT_S))[0]:
            waited_s = time.monotonic() - started_s
            print(f"... starting for {waited_s:.0f} s", file=sys.stderr, flush=True)
        await task
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _read_serve_options(arguments: list[str]) -> "Sources":
    """Return the settings that `penstock serve` would have with these arguments and this
    environment. Raises UsageError if they are invalid.
    """
    from penstock.server.cli import serve
    from penstock.server.settings.sources import BadSetting

    parser = Parser(prog="penstock")
    serve.add_parser(parser.add_subparsers())
    try:
        options = vars(parser.parse_args(["serve", *arguments]))
        return serve.merge_settings(options, os.environ)
    except BadSetting as error:
        raise UsageError(str(error)) from error
    except SystemExit as stop:
        raise UsageError("the options after -- are not valid for `penstock serve`") from stop


def stop_timeout_s(settings: "Sources") -> float:
    """Return how long to wait for a service to stop, seconds: its time limits for draining and for
    the engine's exit plus a margin, at least 120 s.
    """
    from penstock.server.cli import serve
    from penstock.server.settings.sources import BadSetting

    try:
        config = serve.build_config(settings)
    except BadSetting:
        # The service will not start; it reports the reason itself.
        return _MIN_STOP_TIMEOUT_S
    own_s = config.drain_timeout_s + config.executor.max_exit_s
    return max(_MIN_STOP_TIMEOUT_S, own_s + _STOP_SLACK_S)


def _model_kind(name_or_path: str) -> str:
    """Return the kind and quantisation detected in the model's folder; "" if the folder is not
    found.
    """
    from penstock.executor.models import ModelNotFound, resolve_model
    from penstock.executor.trtllm.model_kind import recognise

    try:
        folder = recognise(resolve_model(name_or_path))
    except ModelNotFound:
        return ""
    stored = folder.quantisation
    return folder.kind.value if stored is None else f"{folder.kind.value} ({stored.algorithm})"
