"""Starts and measures the variants (sides) of the tracing benchmark.

All variants stay up and are measured alternately, so that other load on the machine affects all of
them. The last core is reserved for the server under load; engines, observers, collectors and
the load client use the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from loop_ticks import FOLDER_VARIABLE, TickReader
from report import RunFailed, percentile_ms, progress
from services import (
    ALL_CORES,
    MEASURED,
    Service,
    capacity,
    cpu_s,
    line_of,
    pin,
    process,
    request,
    run_client,
    service,
    simulated,
)
from tracing_peers import COUNT_METHOD, NUM_TOKENS, STEP_S

OFF, UP = "no tracing", "collector up"
DEAD, HANGING = "collector dead", "collector hanging"
BARE, METADATA = "grpc.aio", "grpc.aio, metadata"
SDK, CONTRIB = "grpc.aio, SDK on the loop", "grpc.aio, contrib"
PENSTOCK: tuple[str, ...] = (OFF, UP, DEAD, HANGING)
PEERS: tuple[str, ...] = (BARE, METADATA, SDK, CONTRIB)
_PEER_ROLES = {BARE: "bare", METADATA: "metadata", SDK: "sdk", CONTRIB: "contrib"}
_PROMPT_TOKENS = 64
_NUM_CONNECTIONS = 4
_MAX_RUNNING = 512
_DRAIN_S = 10.0
_SETTLE_S = 15.0
_HERE = Path(__file__).resolve().parent


def base_of(side: str) -> str:
    """Return the variant with which this one is compared: the same server without tracing."""
    return OFF if side in PENSTOCK else BARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The results of one measurement of a variant.

    `front_us`, `loop_us`: CPU time per request, microseconds, of all threads of the server and of
    the event loop's thread. `lag_*_ms`: lateness of the loop's ticks. `most_per_s`: rate of a
    closed loop, 0 if it was not measured.
    """

    side: str
    round: int
    per_s: float
    front_us: float
    loop_us: float
    lag_p50_ms: float
    lag_p99_ms: float
    first_p99_ms: float
    foreign_cores: float
    most_per_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Side:
    """A running variant. `watched`: its processes besides `server`; their CPU time does not count
    as other load.

    `count`: returns the numbers of spans that the variant's collector received; None without a
    collector that counts. `num_requests`: number of requests sent to the variant so far.
    """

    name: str
    port: int
    server: int
    watched: list[int]
    ticks: TickReader
    service: Service | None = None
    count: Callable[[], dict[str, int]] | None = None
    num_requests: int = 0
    observer_s: float = 0.0
    spans: dict[str, int] = field(default_factory=dict[str, int])
    num_dropped: float = 0.0

    def run_load(self, seed: int, warm_s: float, window_s: float, **load: float) -> RunResult:
        """Run one measurement and return it. `load`: `rate` (requests per second) for an open loop,
        or `concurrency` for a closed one. Raises RunFailed if a request does not finish.
        """
        pids = [self.server, *self.watched]
        self.ticks.switch(is_on=True)
        found = run_client(
            "arrive",
            {
                "streams": 0,
                "connections": _NUM_CONNECTIONS,
                "port": self.port,
                "request": request(NUM_TOKENS, _PROMPT_TOKENS),
                "pids": ",".join(map(str, pids)),
                "seed": seed,
                "warm": warm_s,
                "window": window_s,
                "drain": _DRAIN_S,
                **load,
            },
        )
        self.ticks.switch(is_on=False)
        self.num_requests += found["num_all_sent"]
        if found["num_all_finished"] != found["num_all_sent"]:
            num_lost = found["num_all_sent"] - found["num_all_finished"]
            raise RunFailed(f"{self.name}: {num_lost} of {found['num_all_sent']} did not finish")
        start_s, end_s = found["start_ns"] * 1e-9, found["end_ns"] * 1e-9
        num = max(1, found["num_finished"])
        foreign_s = found["machine_s"] - sum(found["cpu_s"]) - found["client_s"]
        lags_s = self.ticks.lags_ms(start_s, end_s) / 1e3
        return RunResult(
            side=self.name,
            round=seed,
            per_s=found["num_finished"] / (end_s - start_s),
            front_us=found["cpu_s"][0] * 1e6 / num,
            loop_us=found["loop_s"] * 1e6 / num,
            first_p99_ms=found["first_p99_ms"],
            foreign_cores=max(0.0, foreign_s / (end_s - start_s)),
            lag_p50_ms=percentile_ms(lags_s, 50),
            lag_p99_ms=percentile_ms(lags_s, 99),
        )

    def begin_count(self) -> None:
        """Start counting requests and the observer's CPU time."""
        self.num_requests, self.observer_s = 0, -self._observer_cpu_s()

    def end_count(self) -> None:
        """Wait until all expected spans have arrived or a time limit passes; then stop counting and
        read the number of dropped records.
        """
        until_s = time.monotonic() + _SETTLE_S
        while self.count is not None:
            self.spans = self.count()
            if self.spans["num_roots"] >= self.num_requests or time.monotonic() > until_s:
                break
            time.sleep(0.2)
        self.observer_s += self._observer_cpu_s()
        if self.service is not None and self.name != OFF:
            time.sleep(1.1)  # fronts report their counts once a second
            drops = ("penstock_records_dropped_total", "penstock_trace_dropped_total")
            self.num_dropped = sum(self.service.total(name) for name in drops)

    def _observer_cpu_s(self) -> float:
        pids = [] if self.service is None else self.service.pids("observer")
        return sum(map(cpu_s, pids))


@contextlib.contextmanager
def started_sides(names: tuple[str, ...]) -> Generator[dict[str, Side]]:
    """Start all variants; yield them ready and pinned to their cores. Raises RunFailed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        stack.callback(os.sched_setaffinity, 0, ALL_CORES)
        _prepare_environment(stack, folder)
        sides: dict[str, Side] = {}
        for name in names:
            start = _service_side if name in PENSTOCK else _peer_side
            sides[name] = start(stack, name, folder)
            progress(f"{name}: up")
        for side in sides.values():
            _pin(side)
        yield sides


def _service_side(stack: contextlib.ExitStack, name: str, folder: Path) -> Side:
    endpoint, count, own = _collector(stack, name)
    options = (
        *(*simulated(STEP_S), *MEASURED, *capacity(_MAX_RUNNING, _PROMPT_TOKENS + NUM_TOKENS)),
        *(("--otlp-endpoint", endpoint) if endpoint else ()),
    )
    serving = stack.enter_context(service(*options, has_metrics=bool(endpoint)))
    (front,) = serving.pids("front")
    watched = [*serving.pids("engine"), *serving.pids("observer"), *own]
    return Side(
        name=name,
        port=serving.port,
        server=front,
        watched=watched,
        ticks=TickReader(folder, front),
        service=serving,
        count=count,
    )


def _peer_side(stack: contextlib.ExitStack, name: str, folder: Path) -> Side:
    role = _PEER_ROLES[name]
    endpoint, count, own = _collector(stack, name)
    port, pid = _program(stack, role, *((endpoint,) if endpoint else ()))
    ticks = TickReader(folder, pid)
    return Side(name=name, port=port, server=pid, watched=own, ticks=ticks, count=count)


def _collector(
    stack: contextlib.ExitStack, name: str
) -> tuple[str, Callable[[], dict[str, int]] | None, list[int]]:
    """Start the collector of a variant; return the endpoint for spans ("" without tracing), a
    function that returns the numbers of received spans (None if nothing counts them), and the
    collector's pids.
    """
    if name in (OFF, BARE, METADATA):
        return "", None, []
    if name == DEAD:
        held = stack.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}", None, []
    port, pid = _program(stack, "hanging" if name == HANGING else "collector")
    if name == HANGING:
        return f"http://127.0.0.1:{port}", None, [pid]
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(COUNT_METHOD)

    def count() -> dict[str, int]:
        found: dict[str, int] = json.loads(call(b"", timeout=10))
        return found

    return f"http://127.0.0.1:{port}", count, [pid]


def _program(stack: contextlib.ExitStack, *arguments: str) -> tuple[int, int]:
    """Start one of the processes of `tracing_peers`; return its port and pid."""
    command = (sys.executable, str(_HERE / "tracing_peers.py"), *arguments)
    started = stack.enter_context(process(*command))
    return int(line_of(started)), started.pid


def _prepare_environment(stack: contextlib.ExitStack, folder: Path) -> None:
    """Set the environment of the processes to be started, so that their event loops tick."""
    before = dict(os.environ)

    def restore() -> None:
        os.environ.clear()
        os.environ.update(before)

    stack.callback(restore)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    paths = [str(_HERE / "ticking_site"), str(_HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ[FOLDER_VARIABLE] = str(folder)


def _pin(side: Side) -> None:
    cores = sorted(ALL_CORES)
    if len(cores) < 2:
        return
    pin([side.server], {cores[-1]})
    others = set(cores[:-1])
    parents = [] if side.service is None else [side.service.process.pid]
    pin([*side.watched, *parents], others)
    os.sched_setaffinity(0, others)
