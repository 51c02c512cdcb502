"""Measures the cost of connections and threads for short requests, as ratios.

Compares a new connection for each request, a pool of connections, and a pool with all requests of a
connection in one `Multiplex` call; also compares a blocking client and server, with one thread per
request, with the asynchronous client and server. Runs closed loops of requests with two output
tokens on this machine, alternately, and reports medians over the rounds. The connection modes are
compared over plaintext and over TLS, each without delay and with a round trip of 20 ms; the
threading models over plaintext only.

    python benchmarks/connections.py [--full] [--json FILE]

Penstock and the blocking server use the simulated executor, whose steps take no time, over the
engine's Unix socket. Clients are separate processes on the same cores, so the requests per second
depend on the total CPU time of client, front (gRPC server process) and engine. The table contains
these CPU times. With few cores no ratio can exceed their ratio.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connections_sides import MODES, MULTIPLEXED, NEW, POOLED
from report import (
    Check,
    Outcome,
    arguments,
    at_least,
    at_most,
    medians,
    print_rows,
    progress,
    run,
)
from services import (
    MEASURED,
    capacity,
    cpu_s,
    expect_ready,
    free_port,
    line_of,
    machine_s,
    process,
    service,
    simulated,
)

BLOCKING = "blocking"
IN_FLIGHT = 64
ROUND_TRIP_S = 0.02
CONCURRENCIES = (100, 500, 1000)
MIN_MEAN_RATIOS = {100: 3.5, 500: 6.3}
"""Goals by concurrency: minimum ratio of the mean latency of the blocking service to that of the
asynchronous one.
"""
_HERE = Path(__file__).resolve().parent
_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Route:
    """The network path of the requests: plaintext or TLS, with or without delay."""

    name: str
    is_encrypted: bool = False
    round_trip_s: float = 0.0


PLAIN = Route("plain text")
ROUTES = (
    PLAIN,
    Route("TLS", is_encrypted=True),
    Route("plain text, 20 ms", round_trip_s=ROUND_TRIP_S),
    Route("TLS, 20 ms", is_encrypted=True, round_trip_s=ROUND_TRIP_S),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopResult:
    """The results of one closed loop.

    `client_ms`, `front_ms`, `engine_ms`: CPU time per request, including the warm-up.
    `foreign_cores`: number of cores used by other processes meanwhile.
    """

    route: str
    side: str
    in_flight: int
    per_s: float
    num_failed: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    client_ms: float
    front_ms: float
    engine_ms: float
    foreign_cores: float


def measured(
    route: str, side: str, in_flight: int, pids: tuple[int, int], *arguments: object
) -> ClosedLoopResult:
    """Run a client process with `arguments` (of `connections_sides.py`); return its results and the
    CPU time of front and engine. `pids`: process ids of front and engine.
    """
    before = [cpu_s(pid) for pid in pids]
    busy_s, began_s = machine_s(), time.monotonic()
    done = subprocess.run(
        [sys.executable, str(_HERE / "connections_sides.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    elapsed_s, busy_s = time.monotonic() - began_s, machine_s() - busy_s
    seen: dict[str, Any] = json.loads(done.stdout)
    num_all = max(1, seen.pop("num_all"))
    front_ms, engine_ms = (
        1e3 * (cpu_s(pid) - was) / num_all for pid, was in zip(pids, before, strict=True)
    )
    own_s = (seen["client_ms"] + front_ms + engine_ms) * num_all / 1e3
    loop = ClosedLoopResult(
        route=route,
        side=side,
        in_flight=in_flight,
        front_ms=front_ms,
        engine_ms=engine_ms,
        foreign_cores=max(0.0, busy_s - own_s) / elapsed_s,
        **seen,
    )
    progress(f"{route:<18} {in_flight:>5} in flight  {side:<12} {loop.per_s:>8,.0f} requests/s")
    return loop


def penstock_loops(
    route: Route, sides: Sequence[tuple[str, int]], duration_s: float, rounds: int
) -> list[ClosedLoopResult]:
    """Run every (mode, concurrency) of `sides`, alternately, on one service; return all results."""
    options = (*simulated(0.0), *capacity(1024, 64), *MEASURED)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, contextlib.ExitStack() as stack:
        certificate = _certificate(Path(folder)) if route.is_encrypted else ()
        serving = stack.enter_context(service(*options, *certificate))
        pids = (serving.pids("front")[0], serving.pids("engine")[0])
        port = serving.port
        if route.round_trip_s:
            proxy = (sys.executable, str(_HERE / "delay_proxy.py"), str(port))
            port = int(line_of(stack.enter_context(process(*proxy, str(route.round_trip_s)))))
        ca = certificate[1] if certificate else "-"
        return [
            measured(
                *(route.name, mode, in_flight, pids),
                *("async", mode, f"127.0.0.1:{port}", in_flight, duration_s, ca),
            )
            for _ in range(rounds)
            for mode, in_flight in sides
        ]


def _certificate(folder: Path) -> tuple[str, ...]:
    """Create a self-signed certificate; return the service's TLS options."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    names = ("-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([*made, *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return ("--tls-cert", cert, "--tls-key", key)


def blocking_loops(duration_s: float, rounds: int) -> list[ClosedLoopResult]:
    """Run the blocking client and server at every concurrency; return all results."""
    loops: list[ClosedLoopResult] = []
    roles = (sys.executable, str(_HERE / "blocking_service.py"))
    for _, in_flight in itertools.product(range(rounds), CONCURRENCIES):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder, contextlib.ExitStack() as s:
            path, port = str(Path(folder) / "engine.sock"), free_port()
            engine = s.enter_context(process(*roles, "engine", path))
            expect_ready(engine)
            server = s.enter_context(process(*roles, "front", path, str(port), str(in_flight)))
            expect_ready(server)
            sides = (PLAIN.name, BLOCKING, in_flight, (server.pid, engine.pid))
            address = f"127.0.0.1:{port}"
            loops.append(measured(*sides, BLOCKING, address, in_flight, duration_s))
    return loops


def checks_of(loops: list[ClosedLoopResult]) -> list[Check]:
    """Return the checks that compare connections on each route, then the checks that compare
    threads.
    """
    of = {(one.route, one.side, one.in_flight): one for one in medians(loops, *_KEYS)}
    checks: list[Check] = []
    for route in ROUTES:
        new, pooled, multiplexed = (of[route.name, mode, IN_FLIGHT] for mode in MODES)
        both = f"{route.name}: pooled and multiplexed over new connections"
        checks += [
            at_least(
                f"{route.name}: pooled over new connections, requests/s",
                pooled.per_s / new.per_s,
                *(10.0, "x"),
            ),
            at_least(f"{both}, requests/s", multiplexed.per_s / new.per_s, 30.0, "x"),
            at_most(f"{both}, p99", multiplexed.p99_ms / new.p99_ms, 0.1, "x"),
        ]
    for in_flight, goal in MIN_MEAN_RATIOS.items():
        blocking, other = (of[PLAIN.name, side, in_flight] for side in (BLOCKING, MULTIPLEXED))
        name = f"{in_flight} in flight: mean of blocking over asynchronous"
        checks.append(at_least(name, blocking.mean_ms / other.mean_ms, goal, "x"))
    most = max(CONCURRENCIES)
    failed = sum(one.num_failed for one in loops if one.in_flight == most and one.side != BLOCKING)
    name = f"{most} in flight, asynchronous: errors and time-outs"
    return [*checks, at_most(name, failed, 0, "requests")]


_KEYS = ("route", "side", "in_flight")


def measure(options: Namespace) -> Outcome:
    """Run all loops; print the medians."""
    duration_s, rounds = (5.0, 3) if options.full else (2.5, 1)
    sides = [(mode, IN_FLIGHT) for mode in (NEW, POOLED, MULTIPLEXED)]
    threads = [(mode, num) for num in CONCURRENCIES for mode in (POOLED, MULTIPLEXED)]
    loops = [
        loop
        for route in ROUTES
        for loop in penstock_loops(
            route, sides + (threads if route is PLAIN else []), duration_s, rounds
        )
    ]
    loops += blocking_loops(duration_s, rounds)
    print_rows("Closed loops of requests of two tokens", medians(loops, *_KEYS))
    return loops, checks_of(loops)


if __name__ == "__main__":
    run(arguments(__doc__), measure)
