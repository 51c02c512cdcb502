"""`penstock demo`: starts a service with the demo model, streams three generations and stops the
service; or runs one of three scenes instead.

The service runs as a separate process and is called with gRPC. Its executor is by default the
PyTorch one, with the model that the package contains; for `--flood` and `--deadline`, the simulated
one.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.scheduler.setting import setting
from penstock.server.cli.command import ExitCode, Parser, Subparsers, until_signal
from penstock.server.cli.connection import run_reporting
from penstock.tools.demo.run import DemoRequest, DemoRun, final_table
from penstock.tools.demo.view import View, choose_view
from penstock.tools.flags import add_settings, read_settings
from penstock.tools.own_service import OwnService, ServiceFailed, started_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.client import Client

_DRAIN_TIMEOUT_S = 5.0
_GENERATION_DEADLINE_S = 120.0
_SCENES = {
    "kill": "kill the engine process during streaming: the streams continue with the same tokens",
    "flood": "one tenant floods the service: the effect on another tenant",
    "deadline": "twice the capacity, with deadlines: which requests are in time",
}
_KILLED_TOKENS = 600
_PACED = ("--simulated-config", '{"is_real_time": true, "cost": {"step_s": 0.02}}')
"""Arguments of `penstock serve` for simulated steps of at least 20 ms in real time, so that the
outcome does not depend on the machine's speed.
"""
_EXIT_CODES = """\
exit codes:
  0    all three generations completed, or the scene showed its effect
  1    the service did not start or failed, a generation failed, or the scene showed no effect
  2    invalid usage
  3    with a scene: the service became unavailable
  4    with a scene: a deadline passed
  5    the output could not be written
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C (143: SIGTERM); the service was stopped
  141  the reader of the output has exited
"""
_INTERRUPTED = "penstock demo: interrupted, service stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The executor of the demo's service, its start timeout, and the output length of requests."""

    executor: str | None = setting(
        None,
        "demo",
        "executor that computes the tokens",
        choices=("torch", "simulated"),
        shown="torch; with --flood and --deadline simulated: steps of 20 ms on every machine",
    )
    max_tokens: int = setting(120, "demo", "output tokens per request", at_least=1)
    start_timeout_s: float = setting(
        120.0, "demo", "start timeout of the service, seconds", name="start_timeout", above=0
    )


def add_parser(subparsers: Subparsers) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="start a service, stream three requests concurrently, stop it",
        description="Start a service with the demo model on a free port, stream three generations"
        " at the same time, show their states and timings, and stop the service.",
        epilog=_EXIT_CODES,
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    add_settings(parser, DemoOptions)
    scene = parser.add_mutually_exclusive_group()
    for name, help_text in _SCENES.items():
        scene.add_argument(
            f"--{name}", dest="scene", action="store_const", const=name, default="", help=help_text
        )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("demo", lambda: asyncio.run(until_signal(_demo(args), _INTERRUPTED)))


def demo_requests(max_tokens: int) -> tuple[DemoRequest, ...]:
    """Return three requests, one with a higher priority.

    They have fixed seeds, so that every demo has the same output.
    """
    return (
        DemoRequest(
            name="menenius",
            prompt="MENENIUS:\n",
            options={"max_tokens": max_tokens, "temperature": 0.6, "top_p": 0.9, "seed": 3},
        ),
        DemoRequest(
            name="romeo",
            prompt="ROMEO:\n",
            options={"max_tokens": max_tokens, "temperature": 0.7, "top_k": 40, "seed": 5},
        ),
        DemoRequest(
            name="richard",
            prompt="KING RICHARD III:\n",
            options={
                "max_tokens": max_tokens,
                "temperature": 0.7,
                "top_k": 40,
                "seed": 5,
                "priority": 10,
            },
        ),
    )


async def _demo(args: argparse.Namespace) -> int:
    options = read_settings(args, DemoOptions)
    return await (_scene(options, args.scene) if args.scene else _generations(options))


async def _generations(options: DemoOptions) -> int:
    from penstock.client import Client

    executor = options.executor or "torch"
    print(f"starting a service ({executor} executor, demo model) ...", flush=True)
    runs = [DemoRun(request) for request in demo_requests(options.max_tokens)]
    try:
        async with _service(options, executor) as service:
            print(service.ready_line, flush=True)
            async with Client(service.address) as client:
                await _stream_all(service, client, runs)
            print("\n".join(["", *final_table(runs), ""]), flush=True)
    except ServiceFailed as failure:
        print(f"penstock demo: {failure}", file=sys.stderr, flush=True)
        return ExitCode.FAILED
    print("service stopped", flush=True)
    bad = [run for run in runs if not run.is_sound]
    for run in bad:
        line = f"penstock demo: {run.request.name}: {run.problem}"
        print(line, file=sys.stderr, flush=True)
    return ExitCode.FAILED if bad else ExitCode.OK


def _service(options: DemoOptions, executor: str, *serve_args: str) -> OwnService:
    usual = ("--model", "demo", "--executor", executor, "--log-level", "error")
    return OwnService(
        (*usual, *serve_args),
        start_timeout_s=options.start_timeout_s,
        drain_timeout_s=_DRAIN_TIMEOUT_S,
    )


async def _scene(options: DemoOptions, scene: str) -> int:
    """Start the services that a scene ("kill", "flood" or "deadline") needs and run it; return the
    exit code.
    """
    from penstock.tools.demo import deadline, flood
    from penstock.tools.demo.kill import kill_scene

    executor = options.executor or ("torch" if scene == "kill" else "simulated")
    print(f"starting ({executor} executor, demo model) ...", flush=True)
    try:
        if scene == "kill":
            async with _service(options, executor) as service:
                return await kill_scene(service, demo_requests(_KILLED_TOKENS))
        module = flood if scene == "flood" else deadline
        play = flood.flood_scene if scene == "flood" else deadline.deadline_scene
        plain = ("--order", "fcfs", "--deadline-admission", "off")
        serve_args = (*module.SERVE_ARGS, *(_PACED if executor == "simulated" else ()))
        usual = _service(options, executor, *serve_args)
        fcfs = _service(options, executor, *serve_args, *plain)
        async with started_together(usual, fcfs):
            return await play(usual, fcfs)
    except ServiceFailed as failure:
        print(f"penstock demo: {failure}", file=sys.stderr, flush=True)
        return ExitCode.FAILED


async def _stream_all(service: OwnService, client: "Client", runs: "Sequence[DemoRun]") -> None:
    """Stream all requests concurrently. Raises ServiceFailed if the service exits meanwhile."""
    view = choose_view(sys.stdout, runs)
    streams = asyncio.gather(*(_stream(client, run, view) for run in runs))
    gone = asyncio.create_task(service.wait_until_gone())
    try:
        waits: set[asyncio.Future[Any]] = {streams, gone}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise service.exit_error()
        await streams
    finally:
        gone.cancel()
        streams.cancel()
        await asyncio.gather(streams, gone, return_exceptions=True)
        view.close()


async def _stream(client: "Client", run: DemoRun, view: View) -> None:
    from penstock.client import PenstockError

    started_s = time.monotonic()
    events = client.generate(
        run.request.prompt, deadline_s=_GENERATION_DEADLINE_S, **run.request.options
    )
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                state = run.state
                text = run.on_event(event, time.monotonic() - started_s)
                if text:
                    view.on_text(run, text)
                if run.state != state:
                    view.on_state(run)
        except PenstockError as error:
            run.on_error(error, time.monotonic() - started_s)
            view.on_state(run)
