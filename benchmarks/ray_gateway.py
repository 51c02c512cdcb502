"""Measures the overhead of Ray Serve: compares a service behind Ray Serve's ingress with one
without it, at 32 streams.

Uses one node, one replica, the simulated executor, and one asyncio client. Rounds alternate between
the two, each with separate processes. `steady`: steps of 20 ms, like a large model; `full`: steps
of 1 ms, faster than tokens can be delivered one by one. When one stream ends, the next begins; the
time to the first token includes the wait for the current step.

    python benchmarks/ray_gateway.py [--full] [--json FILE]

Needs Ray: `pip install '.[ray]'`, or PENSTOCK_RAY_PYTHON names a Python that has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from load import LoadRequest, RequestOutcome, closed_loop, sending
from penstock.client import NO_RETRY, Client
from report import (
    Outcome,
    RunFailed,
    arguments,
    at_least,
    at_most,
    over,
    percentile_ms,
    print_rows,
    run,
)
from services import MEASURED, capacity, free_port, service, simulated

NATIVE, RAY = "native", "Ray Serve"
NUM_STREAMS = 32
NUM_TOKENS = {"steady": 64, "full": 512}
STEP_MS = {"steady": 20.0, "full": 1.0}
PYTHON = os.environ.get("PENSTOCK_RAY_PYTHON", sys.executable)
_ROOT = Path(__file__).resolve().parents[1]
_ROOTS = ("protos", "scheduler", "executors", "server", "clients", "gateways")
_START_S = 90.0
_WARM_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """The results of one side (Ray or native) under one load, in the window after the warm-up."""

    load: str
    side: str
    tokens_per_s: float
    messages_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    num_failed: int


def options(load: str) -> tuple[str, ...]:
    """Return the service's options, the same on both sides."""
    sizes = capacity(NUM_STREAMS, NUM_TOKENS[load])
    return (*simulated(STEP_MS[load] / 1e3), *sizes, *MEASURED)


@contextlib.contextmanager
def ray_service(*given: str) -> Generator[int]:
    """Start a Ray node; yield the port of its gRPC ingress; stop the node at the end. Raises
    RunFailed if it does not start.
    """
    grpc_port = free_port()
    folder = tempfile.mkdtemp(prefix="pr-")
    environment = {
        **os.environ,
        **_recommended(),
        "PYTHONPATH": os.pathsep.join(str(_ROOT / root) for root in _ROOTS),
        "RAY_TMPDIR": folder,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # use only the loopback interface
    }
    command = (PYTHON, Path(__file__).with_name("ray_gateway_site.py"), str(free_port()))
    site = subprocess.Popen(
        (*command, str(grpc_port), "--metrics-port", "off", *given),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert site.stdin is not None
    assert site.stdout is not None
    try:
        is_ready = select.select([site.stdout], [], [], _START_S)[0]
        if not is_ready or site.stdout.readline() != b"ready\n":
            raise RunFailed("Ray did not start; is ray[serve] installed?")
        yield grpc_port
    finally:
        site.stdin.close()
        try:
            site.wait(_START_S)
        finally:
            site.kill()
            site.wait()
            site.stdout.close()
            shutil.rmtree(folder, ignore_errors=True)


def _recommended() -> dict[str, str]:
    lines = (_ROOT / "deploy/ray/ray.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


async def measured(port: int, side: str, load: str, window_s: float) -> VariantResult:
    """Keep the streams running; return the figures of the window after the warm-up. `num_failed`
    includes the warm-up.
    """
    found: list[RequestOutcome] = []
    request = LoadRequest(num_tokens=NUM_TOKENS[load])
    async with Client(f"127.0.0.1:{port}", retry=NO_RETRY) as client:
        send = sending(client)

        async def call(_: int) -> None:
            found.append(await send(request))

        begin_s = time.perf_counter() + _WARM_S
        await closed_loop(call, NUM_STREAMS, _WARM_S + window_s)
    end_s = begin_s + window_s
    inside = [
        num
        for one in found
        for after_s, num in one.messages
        if begin_s <= one.ended_s - one.total_s + after_s < end_s
    ]
    ttft_s = [one.ttft_s for one in found if one.ttft_s and one.ended_s - one.total_s >= begin_s]
    return VariantResult(
        load=load,
        side=side,
        tokens_per_s=sum(inside) / window_s,
        messages_per_s=len(inside) / window_s,
        ttft_p50_ms=percentile_ms(ttft_s, 50),
        ttft_p99_ms=percentile_ms(ttft_s, 99),
        num_failed=sum(one.end != "OK" for one in found),
    )


def run_side(side: str, load: str, window_s: float) -> VariantResult:
    """Start one side, run the load once, and return the results."""
    if side == NATIVE:
        with service(*options(load)) as serving:
            return asyncio.run(measured(serving.port, side, load, window_s))
    with ray_service(*options(load)) as port:
        return asyncio.run(measured(port, side, load, window_s))


def measure(given: Namespace) -> Outcome:
    """Run several rounds of both sides under both loads."""
    num_rounds, window_s = (5, 20.0) if given.full else (1, 6.0)
    runs = [
        run_side(side, load, window_s)
        for load in STEP_MS
        for _ in range(num_rounds)
        for side in (NATIVE, RAY)
    ]
    print_rows(f"Ray Serve and native, {NUM_STREAMS} streams", runs)

    def ratio(load: str, figure: str) -> float:
        ray, native = (
            [one for one in runs if (one.load, one.side) == (load, side)] for side in (RAY, NATIVE)
        )
        return over(ray, native, figure)

    speed = "Ray Serve to native, 32 streams"
    is_settled = num_rounds >= 3
    goals = (
        (at_least, "tokens/s at steps of 20 ms", ratio("steady", "tokens_per_s"), 0.9),
        (at_most, "TTFT p50 at steps of 20 ms", ratio("steady", "ttft_p50_ms"), 2.0),
        (at_least, "tokens/s at steps of 1 ms", ratio("full", "tokens_per_s"), 0.1),
    )
    return runs, [
        *(
            judge(f"{speed}: {name}", value, goal, "of native", is_settled=is_settled)
            for judge, name, value, goal in goals
        ),
        at_most("failed calls", sum(one.num_failed for one in runs), 0, "calls"),
    ]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
