"""The overhead of Ray Serve: a service behind its ingress and without it, at 32 streams.

Uses one node, one replica, the simulated executor, and one asyncio client. Rounds alternate between
the two, each with separate processes. `steady`: steps of 20 ms, like a large model; `full`: steps
of 1 ms, faster than single tokens can be delivered. When one stream ends, the next begins; the time
to the first token includes the wait for the current step.

    python benchmarks/everywhere_ray.py [--full] [--json FILE]

Needs Ray: `pip install '.[ray]'`, or PENSTOCK_RAY_PYTHON names a Python that has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from penstock.v1 import generation_service_pb2 as pb
from report import (
    Check,
    RunFailed,
    arguments,
    at_least,
    at_most,
    print_checks,
    print_table,
    write_json,
)
from services import MEASURED, capacity, free_port, request, service, simulated

NATIVE, RAY = "native", "Ray Serve"
NUM_STREAMS = 32
NUM_TOKENS = {"steady": 64, "full": 512}
STEP_MS = {"steady": 20.0, "full": 1.0}
PYTHON = os.environ.get("PENSTOCK_RAY_PYTHON", sys.executable)
_ROOT = Path(__file__).resolve().parents[1]
_ROOTS = ("protos", "scheduler", "executors", "server", "clients", "gateways")
_START_S = 90.0
_WARM_S = 2.0


@dataclass(kw_only=True)
class Found:
    """The results of one side (Ray or native) under one load. Times are in seconds."""

    side: str
    load: str
    window_s: float
    num_tokens: int = 0
    num_messages: int = 0
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list[float])

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second delivered within the window."""
        return self.num_tokens / self.window_s

    def ttft_ms(self, percent: int) -> float:
        """Return a percentile of the TTFT."""
        if len(self.ttft_s) < 2:
            raise RunFailed(f"{self.side}, {self.load}: no stream began within the window")
        return statistics.quantiles(self.ttft_s, n=100)[percent - 1] * 1e3


Rounds: TypeAlias = "dict[str, list[dict[str, Found]]]"
"""Results by load, then round, then side."""


def options(load: str) -> tuple[str, ...]:
    """Return the service's options, the same on both sides."""
    sizes = capacity(NUM_STREAMS, NUM_TOKENS[load])
    return (*simulated(STEP_MS[load] / 1e3), *sizes, *MEASURED)


@contextlib.contextmanager
def ray_service(*given: str) -> Generator[int]:
    """Start a Ray node within the block; yield the port of its ingress. Raises RunFailed if it does
    not start.
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
    command = (PYTHON, Path(__file__).with_name("everywhere_ray_site.py"), str(free_port()))
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
        is_heard = select.select([site.stdout], [], [], _START_S)[0]
        if not is_heard or site.stdout.readline() != b"ready\n":
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


async def measured(port: int, found: Found) -> None:
    """Keep the streams running, and count the tokens received within the window."""
    data = request(NUM_TOKENS[found.load])
    begin_s = time.monotonic() + _WARM_S
    end_s = begin_s + found.window_s
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate: Any = channel.unary_stream(
            "/penstock.v1.GenerationService/Generate",
            response_deserializer=pb.GenerateResponse.FromString,
        )
        await asyncio.gather(
            *(_caller(generate, data, found, begin_s, end_s) for _ in range(NUM_STREAMS))
        )


async def _caller(generate: Any, data: bytes, found: Found, begin_s: float, end_s: float) -> None:
    while (sent_s := time.monotonic()) < end_s:
        is_first = True
        call = generate(data)
        try:
            async for message in call:
                now_s = time.monotonic()
                if now_s >= end_s:
                    call.cancel()
                    return
                if message.WhichOneof("event") != "tokens" or now_s < begin_s:
                    is_first = is_first and message.WhichOneof("event") != "tokens"
                    continue
                found.num_tokens += message.tokens.num_tokens
                found.num_messages += 1
                if is_first and sent_s >= begin_s:
                    found.ttft_s.append(now_s - sent_s)
                is_first = False
        except grpc.aio.AioRpcError:
            found.num_failed += 1
            return


def side_of(side: str, load: str, window_s: float) -> Found:
    """Run one side once."""
    found = Found(side=side, load=load, window_s=window_s)
    if side == NATIVE:
        with service(*options(load)) as serving:
            asyncio.run(measured(serving.port, found))
    else:
        with ray_service(*options(load)) as port:
            asyncio.run(measured(port, found))
    return found


def ratio(rounds: Sequence[dict[str, Found]], value: Callable[[Found], float]) -> float:
    """Return the median over the rounds of the ratio of Ray to native."""
    return statistics.median(value(each[RAY]) / value(each[NATIVE]) for each in rounds)


def run(*, is_full: bool = False) -> list[Check]:
    """Measure, print and check. Raises RunFailed, also if Ray is not installed."""
    return judged(measured_rounds(is_full=is_full))


def measured_rounds(*, is_full: bool) -> Rounds:
    """Run several rounds of both sides under both loads; print the results."""
    num_rounds, window_s = (5, 20.0) if is_full else (1, 6.0)
    rounds = {
        load: [
            {side: side_of(side, load, window_s) for side in (NATIVE, RAY)}
            for _ in range(num_rounds)
        ]
        for load in STEP_MS
    }
    runs = [found for each in rounds.values() for pair in each for found in pair.values()]
    print_table(
        f"Ray Serve and native, {NUM_STREAMS} streams",
        ("load", "side", "tokens/s", "messages/s", "TTFT p50 ms", "p99 ms", "failed"),
        [
            (
                found.load,
                found.side,
                found.tokens_per_s,
                found.num_messages / found.window_s,
                found.ttft_ms(50),
                found.ttft_ms(99),
                found.num_failed,
            )
            for found in runs
        ],
    )
    return rounds


def judged(rounds: Rounds) -> list[Check]:
    steady, full = rounds["steady"], rounds["full"]
    failed = sum(f.num_failed for pair in (*steady, *full) for f in pair.values())
    is_settled = len(steady) >= 3
    speed = "Ray Serve to native, 32 streams"
    return [
        at_least(
            f"{speed}: tokens/s at steps of 20 ms",
            ratio(steady, lambda found: found.tokens_per_s),
            0.9,
            "of native",
            is_settled=is_settled,
        ),
        at_most(
            f"{speed}: TTFT p50 at steps of 20 ms",
            ratio(steady, lambda found: found.ttft_ms(50)),
            2.0,
            "of native",
            is_settled=is_settled,
        ),
        at_least(
            f"{speed}: tokens/s at steps of 1 ms",
            ratio(full, lambda found: found.tokens_per_s),
            0.1,
            "of native",
            is_settled=is_settled,
        ),
        at_most("failed calls", failed, 0, "calls"),
    ]


def main() -> None:
    given = arguments("What Ray Serve costs, at 32 streams").parse_args()
    rounds = measured_rounds(is_full=given.full)
    checks = judged(rounds)
    print_checks(checks)
    runs = [found for each in rounds.values() for pair in each for found in pair.values()]
    write_json(given.json, [asdict(found) for found in runs], checks)


if __name__ == "__main__":
    main()
