"""The cost of connections and threads for short requests, as ratios.

Compares a new connection for each request, a pool of connections, and a pool with all requests of a
connection in one `Multiplex` call; also compares a blocking client and server, with one thread per
request, with the asynchronous ones. Runs closed loops of requests with two output tokens on this
machine, alternately, and reports medians over the rounds. Connections are compared with plaintext
and with TLS, each directly and with a round trip of 20 ms; threads are compared with plaintext.

    python benchmarks/connections.py [--full] [--json FILE]

Penstock and the blocking server use the simulated executor, whose steps take no time, over the same
socket. Clients are separate processes on the same cores, so the requests per second depend on the
total CPU time of client, front-end process and engine. On few cores no ratio can exceed the ratio
of these costs, which are in the table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from connections_sides import MODES, MULTIPLEXED, NEW, NUM_TOKENS, POOLED, Seen
from report import Check, arguments, at_least, at_most, conclude, print_table, progress
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
MARKS = {100: (45.2, 12.8), 500: (218.7, 34.5), 1000: (None, 67.2)}
"""By concurrency: latencies (ms) reported elsewhere for a blocking and an asynchronous service;
None: timeouts.
"""
_HERE = Path(__file__).resolve().parent
_ROLES = str(_HERE / "connections_sides.py")
_DELAY_PROXY = str(_HERE / "delay_proxy.py")
_BLOCKING_SERVICE = str(_HERE / "blocking_service.py")
_LIMIT_S = 90.0
_COSTS = ("client CPU ms", "front CPU ms", "engine CPU ms", "others, cores")


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
class Run:
    """The results of one closed loop. `front_ms`, `engine_ms`: CPU time per request;
    `foreign_cores`: number of cores used by other processes meanwhile.
    """

    route: str
    side: str
    concurrency: int
    seen: Seen
    front_ms: float
    engine_ms: float
    foreign_cores: float


def client(*arguments: object) -> Seen:
    """Run one client process until it exits; return its results."""
    done = subprocess.run(
        [sys.executable, _ROLES, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return Seen(**found)


def measured(
    side: str,
    concurrency: int,
    pids: tuple[int, int],
    *arguments: object,
    route: Route = PLAIN,
) -> Run:
    """Run one client, and measure the CPU time of front and engine (`pids`) meanwhile."""
    before = [cpu_s(pid) for pid in pids]
    busy_s, began_s = machine_s(), time.monotonic()
    seen = client(*arguments)
    elapsed_s, busy_s = time.monotonic() - began_s, machine_s() - busy_s
    front_ms, engine_ms = (
        1e3 * (cpu_s(pid) - was) / max(1, seen.num_all)
        for pid, was in zip(pids, before, strict=True)
    )
    own_ms = (seen.client_ms + front_ms + engine_ms) * seen.num_all
    run = Run(
        route=route.name,
        side=side,
        concurrency=concurrency,
        seen=seen,
        front_ms=front_ms,
        engine_ms=engine_ms,
        foreign_cores=max(0.0, busy_s - own_ms / 1e3) / elapsed_s,
    )
    progress(
        f"{route.name:<18} {concurrency:>5} in flight  {side:<12} {seen.per_s:>8,.0f} requests/s"
        f"  p99 {seen.p99_ms:,.1f} ms  {seen.num_failed} failed"
        f"  others {run.foreign_cores:.1f} cores"
    )
    return run


def penstock_runs(
    route: Route, sides: Sequence[tuple[str, int]], duration_s: float, rounds: int
) -> list[Run]:
    """Run every mode at its concurrency, alternately, on one service."""
    options = (*simulated(0.0), *capacity(1024, 64), *MEASURED)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, contextlib.ExitStack() as stack:
        certificate = _certificate(Path(folder)) if route.is_encrypted else ()
        serving = stack.enter_context(service(*options, *certificate))
        pids = (serving.pids("front")[0], serving.pids("engine")[0])
        port = serving.port
        if route.round_trip_s:
            port = stack.enter_context(_delayed(port, route.round_trip_s))
        address = f"127.0.0.1:{port}"
        ca = certificate[1] if certificate else "-"
        return [
            measured(
                *(mode, concurrency, pids),
                *("async", mode, address, concurrency, duration_s, ca),
                route=route,
            )
            for _ in range(rounds)
            for mode, concurrency in sides
        ]


def _certificate(folder: Path) -> tuple[str, ...]:
    """Create a self-signed certificate; return the service's TLS options."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    names = ("-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([*made, *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return ("--tls-cert", cert, "--tls-key", key)


@contextlib.contextmanager
def _delayed(port: int, round_trip_s: float) -> Generator[int]:
    """Start a proxy that delays traffic to and from `port`; yield the proxy's port."""
    with process(sys.executable, _DELAY_PROXY, str(port), str(round_trip_s)) as proxy:
        yield int(line_of(proxy))


def blocking_runs(duration_s: float, rounds: int) -> list[Run]:
    """Run the blocking client and server at every concurrency."""
    runs: list[Run] = []
    for _, concurrency in itertools.product(range(rounds), CONCURRENCIES):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            path, port = str(Path(folder) / "engine.sock"), free_port()
            front = (sys.executable, _BLOCKING_SERVICE, "front", path, str(port), str(concurrency))
            with (
                process(sys.executable, _BLOCKING_SERVICE, "engine", path) as engine,
                _after(engine, *front) as server,
            ):
                expect_ready(server)
                pids, address = (server.pid, engine.pid), f"127.0.0.1:{port}"
                runs.append(
                    measured(
                        BLOCKING, concurrency, pids, BLOCKING, address, concurrency, duration_s
                    )
                )
    return runs


@contextlib.contextmanager
def _after(first: subprocess.Popen[str], *command: str) -> Generator[subprocess.Popen[str]]:
    """Start a process after `first` is ready."""
    expect_ready(first)
    with process(*command) as started:
        yield started


def median(
    runs: list[Run],
    side: str,
    concurrency: int,
    value: Callable[[Run], float],
    route: Route = PLAIN,
) -> float:
    return statistics.median(
        value(run)
        for run in runs
        if (run.route, run.side, run.concurrency) == (route.name, side, concurrency)
    )


per_s = attrgetter("seen.per_s")
mean_ms, p50_ms, p99_ms = (attrgetter(f"seen.{name}_ms") for name in ("mean", "p50", "p99"))


def costs_of(runs: list[Run], side: str, concurrency: int, route: Route = PLAIN) -> list[float]:
    """Return the CPU time per request of client, front and engine, and the number of cores used by
    other processes."""
    names = ("seen.client_ms", "front_ms", "engine_ms", "foreign_cores")
    return [median(runs, side, concurrency, attrgetter(name), route) for name in names]


def connection_checks(runs: list[Run]) -> list[Check]:
    """Print the table of connections; return its checks."""
    rows: list[tuple[object, ...]] = []
    checks: list[Check] = []
    for route in ROUTES:
        rate, mean, p99 = (
            {mode: median(runs, mode, IN_FLIGHT, value, route) for mode in MODES}
            for value in (per_s, mean_ms, p99_ms)
        )
        rows += [
            (
                *(route.name, mode, rate[mode], rate[mode] / rate[NEW], mean[mode], p99[mode]),
                *(p99[mode] / p99[NEW], *costs_of(runs, mode, IN_FLIGHT, route)),
            )
            for mode in MODES
        ]
        checks += [
            at_least(
                f"{route.name}: pooled over new connections, requests/s",
                rate[POOLED] / rate[NEW],
                10.0,
                "x",
            ),
            at_least(
                f"{route.name}: pooled and multiplexed over new connections, requests/s",
                rate[MULTIPLEXED] / rate[NEW],
                30.0,
                "x",
            ),
            at_most(
                f"{route.name}: pooled and multiplexed over new connections, p99",
                p99[MULTIPLEXED] / p99[NEW],
                0.1,
                "x",
            ),
        ]
    print_table(
        f"Connections, {IN_FLIGHT} in flight, {NUM_TOKENS} tokens each",
        (
            *("route", "connections", "requests/s", "over new", "mean ms", "p99 ms"),
            *("p99 over new", *_COSTS),
        ),
        rows,
    )
    return checks


def thread_checks(runs: list[Run]) -> list[Check]:
    """Print the table of threads; return its checks."""
    rows: list[tuple[object, ...]] = []
    for concurrency in CONCURRENCIES:
        blocking_mark, async_mark = MARKS[concurrency]
        marked = "time-out" if blocking_mark is None else f"{blocking_mark:g}"
        for side, mark in ((BLOCKING, marked), (POOLED, f"{async_mark:g}"), (MULTIPLEXED, "")):
            of = [
                median(runs, side, concurrency, value) for value in (per_s, mean_ms, p50_ms, p99_ms)
            ]
            failed = median(runs, side, concurrency, attrgetter("seen.num_failed"))
            costs = costs_of(runs, side, concurrency)
            rows.append((concurrency, side, *of, failed, *costs, mark))
    print_table(
        "Threads and event loops",
        (
            *("in flight", "side", "requests/s", "mean ms", "p50 ms", "p99 ms", "failed"),
            *(*_COSTS, "theirs ms"),
        ),
        rows,
    )
    most = max(CONCURRENCIES)
    checks = [
        at_least(
            f"{concurrency} in flight: mean of blocking over asynchronous",
            median(runs, BLOCKING, concurrency, mean_ms)
            / median(runs, MULTIPLEXED, concurrency, mean_ms),
            blocking_mark / async_mark,
            "x",
        )
        for concurrency, (blocking_mark, async_mark) in MARKS.items()
        if blocking_mark is not None
    ]
    failed = sum(
        run.seen.num_failed for run in runs if run.concurrency == most and run.side != BLOCKING
    )
    return [
        *checks,
        at_most(
            f"{most} in flight, asynchronous: errors and time-outs", float(failed), 0.0, "requests"
        ),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    duration_s, rounds = (5.0, 3) if options.full else (2.5, 1)
    sides = [(mode, IN_FLIGHT) for mode in MODES]
    threads = [(mode, num) for num in CONCURRENCIES for mode in (POOLED, MULTIPLEXED)]
    runs = [
        run
        for route in ROUTES
        for run in penstock_runs(
            route, sides + (threads if route is PLAIN else []), duration_s, rounds
        )
    ]
    runs += blocking_runs(duration_s, rounds)
    checks = connection_checks(runs) + thread_checks(runs)
    conclude(options, [asdict(run) for run in runs], checks)


if __name__ == "__main__":
    main()
