"""Runs one cell of the delivery benchmark: one server under one load.

Starts the server, the source of its tokens and the load client, pins them to cores, reads the load
client's output, and terminates the processes. The server has a dedicated core (if there are at
least two); the engine or producer and the client share the other cores. Nothing is pinned with two
fronts (gRPC server processes).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import native_build
from report import RunFailed
from services import (
    ALL_CORES,
    MEASURED,
    TIMEOUT_S,
    capacity,
    expect_ready,
    free_port,
    pin,
    process,
    request,
    run_client,
    service,
    simulated,
)

GENERATE, TWO_FRONTS, MULTIPLEX = "Generate", "Generate, 2 fronts", "Multiplex"
AIO, EVENTS, LINES, CORE = "grpc.aio", "FastAPI SSE", "TCP lines", "C++ gRPC"
SIDES = (GENERATE, TWO_FRONTS, MULTIPLEX, AIO, EVENTS, LINES, CORE)
PENSTOCK = (GENERATE, TWO_FRONTS, MULTIPLEX)
Load: TypeAlias = tuple[int, float]
"""Number of streams, and milliseconds per step."""
_ROLES = {AIO: "aio", EVENTS: "events", LINES: "lines"}
_MODES = {MULTIPLEX: "multiplex", EVENTS: "events", LINES: "lines"}
_PAUSE_S = 1.0
_FIRST_MARK = 12
"""The step of the first scripted pause; by then every stream has received its first token."""
_MAX_TOKENS = 4000
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: one server under one load. `warm_s`: seconds of warm-up; `window_s`: seconds
    measured.

    `round_index`: the round of this measurement; servers are compared within a round.
    """

    side: str
    num_streams: int
    step_ms: float
    warm_s: float
    window_s: float
    round_index: int = 0

    @property
    def open_s(self) -> float:
        """Seconds allowed for opening the streams."""
        return 0.5 + 0.002 * self.num_streams

    @property
    def num_connections(self) -> int:
        """Number of gRPC connections in the client's pool; the kernel spreads them over fronts at
        random.
        """
        return min(self.num_streams, 16 if self.side == TWO_FRONTS else 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of a cell.

    Attributes:
        server_us, engine_us, client_us: CPU time per token, microseconds.
        foreign_cores: Number of cores used by other processes meanwhile.
        slip_ms: How late the token source was by its own schedule, -1 if unknown.
        delay_*_ms: Delays from when a token was due, less this lateness.
        strict_p99_ms: The p99 delay with this lateness; if it is unknown, `delay_p99_ms`.
        is_aligned: Whether all streams got the same number of tokens before the second scripted
            pause; for other servers than Penstock, whether the schedule file could be read.
    """

    side: str
    num_streams: int
    step_ms: float
    round_index: int
    num_tokens: int
    num_messages: int
    tokens_per_s: float
    server_us: float
    server_cores: float
    engine_us: float
    client_us: float
    foreign_cores: float
    delay_p50_ms: float
    delay_p99_ms: float
    strict_p99_ms: float
    slip_ms: float
    is_aligned: bool

    @property
    def load(self) -> Load:
        """The number of streams and the step time, ms."""
        return self.num_streams, self.step_ms

    @property
    def message_us(self) -> float:
        """The server's CPU time per message, microseconds."""
        return self.server_us * self.num_tokens / max(1, self.num_messages)

    @property
    def delivered(self) -> float:
        """Delivered tokens as a share of the offered tokens."""
        return self.tokens_per_s * self.step_ms / 1e3 / self.num_streams

    @property
    def per_core(self) -> float:
        """Tokens delivered per second of the server's CPU time."""
        return 1e6 / self.server_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running server. `servers`, `source`: process ids.

    `schedule`: a file with the time at which the first token is due; None if the client must infer
    the schedule from scripted pauses.
    """

    port: int
    servers: list[int]
    source: int
    schedule: Path | None = None


def measure(cell: Cell) -> CellResult:
    """Run one cell. Raises RunFailed if it fails, CannotBuild if a program cannot be built on this
    machine.
    """
    native_build.load_client()
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        side = _service(cell) if cell.side in PENSTOCK else _peer(cell, Path(name))
        with side as target:
            if cell.side != TWO_FRONTS:
                _pin(target)
            try:
                return _seen(cell, _drive(cell, target))
            finally:
                os.sched_setaffinity(0, ALL_CORES)


@contextlib.contextmanager
def _service(cell: Cell) -> Generator[Target]:
    step_s = cell.step_ms / 1e3
    last = _FIRST_MARK + math.ceil((cell.warm_s + cell.window_s + 0.2) / step_s)
    # All streams open during the first step, so that none gets a token before all are open.
    slow = {1: cell.open_s, _FIRST_MARK: _PAUSE_S, last: _PAUSE_S}
    marks: list[dict[str, object]] = [
        {"kind": "slow_step", "at_step": step, "seconds": seconds} for step, seconds in slow.items()
    ]
    num_fronts = 2 if cell.side == TWO_FRONTS else 1
    sizes = capacity(cell.num_streams, _MAX_TOKENS)
    options = (*simulated(step_s, faults=marks), *sizes, *MEASURED)
    with service(*options, num_fronts=num_fronts) as found:
        (engine,) = found.pids("engine")
        yield Target(port=found.port, servers=found.pids("front"), source=engine)


@contextlib.contextmanager
def _peer(cell: Cell, folder: Path) -> Generator[Target]:
    roles = str(_HERE / "delivery_peers.py")
    path, schedule = str(folder / "source.sock"), folder / "schedule"
    step_s, num_streams = str(cell.step_ms / 1e3), str(cell.num_streams)
    port = free_port()
    with contextlib.ExitStack() as stack:
        paced = (sys.executable, roles, "producer", path, num_streams, step_s, str(schedule))
        producer = stack.enter_context(process(*paced))
        expect_ready(producer)
        if cell.side == CORE:
            command = [str(native_build.grpc_server()), str(port), path]
        else:
            command = [sys.executable, roles, _ROLES[cell.side], path, str(port)]
        server = stack.enter_context(process(*command))
        expect_ready(server)
        yield Target(port=port, servers=[server.pid], source=producer.pid, schedule=schedule)


def _drive(cell: Cell, target: Target) -> dict[str, Any]:
    options: dict[str, object] = {
        "mode": _MODES.get(cell.side, "grpc"),
        "port": target.port,
        "streams": cell.num_streams,
        "connections": cell.num_connections,
        "request": request(_MAX_TOKENS),
        "step": cell.step_ms / 1e3,
        "pause": _PAUSE_S,
        "warm": cell.warm_s,
        "window": cell.window_s,
        "servers": ",".join(map(str, target.servers)),
        "others": target.source,
        "limit": TIMEOUT_S,
    }
    if target.schedule is not None:
        options["schedule"] = target.schedule
    return run_client("deliver", options)


def _seen(cell: Cell, found: dict[str, Any]) -> CellResult:
    if found["num_ended"]:
        raise RunFailed(f"{found['num_ended']} streams ended")
    num_tokens = max(1, found["num_tokens"])
    server_s, source_s = sum(found["servers_s"]), sum(found["others_s"])
    window_s, client_s = found["window_s"], found["client_s"]
    foreign_s = found["machine_s"] - server_s - source_s - client_s
    return CellResult(
        side=cell.side,
        num_streams=cell.num_streams,
        step_ms=cell.step_ms,
        round_index=cell.round_index,
        num_tokens=num_tokens,
        num_messages=found["num_messages"],
        tokens_per_s=num_tokens / window_s,
        server_us=server_s * 1e6 / num_tokens,
        server_cores=server_s / window_s,
        engine_us=source_s * 1e6 / num_tokens,
        client_us=client_s * 1e6 / num_tokens,
        foreign_cores=max(0.0, foreign_s / window_s),
        delay_p50_ms=found["delay_p50_ms"],
        delay_p99_ms=found["delay_p99_ms"],
        strict_p99_ms=found["strict_p99_ms"],
        slip_ms=found["slip_ms"],
        is_aligned=found["is_aligned"],
    )


def _pin(target: Target) -> None:
    """Pin the server to the last core, and its token source and this process's children to the
    others.
    """
    cores = sorted(ALL_CORES)
    if len(cores) < 2:
        return
    pin(target.servers, {cores[-1]})
    pin([target.source], set(cores[:-1]))
    os.sched_setaffinity(0, cores[:-1])
