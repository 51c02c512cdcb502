"""Measures the effect of several attacks on a well-behaved client.

Runs a service with the simulated executor and one front-end process. A probe sends short requests
one after another on a separate connection, while an attack runs repeatedly in a separate process.
Reports the probe's worst percentile and its errors, and the memory of the front process after the
attack.

    python benchmarks/abuse.py [--full] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1.generation_service_pb2 import GenerateRequest
from report import Check, arguments, at_most, print_checks, print_table, progress, write_json
from services import MEASURED, capacity, cpu_s, request, service, simulated

ATTACKS = (
    *("rapid_reset", "open_and_hang", "settings_flood", "ping_flood", "empty_data"),
    *("continuation_flood", "window_updates", "garbage", "bad_frames", "compression_bomb"),
    *(
        "huge_metadata",
        "huge_messages",
        "half_sent_messages",
        "unknown_fields",
        "zero_windows",
        "idle_connections",
    ),
)
MAX_PROBE_P99_MS = 200.0
MAX_GROWTH_MIB = 20.0
MALFORMED = 100_000
_TESTS = Path(__file__).resolve().parents[1] / "tests"
_PATIENCE_S = 60.0
_CALL_S = 30.0
_MIN_PROBES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of one attack: latencies of the probe's calls in ms, memory of the front process
    in MiB.

    `growth`: the increase over the memory before all attacks.
    """

    attack: str
    num_attacks: int
    num_probes: int
    num_errors: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    front_cpu_s: float
    rss_peak: float
    growth: float


@dataclass
class Probe:
    """The well-behaved client; runs in a thread."""

    address: str
    seconds: list[float] = field(default_factory=list[float])
    errors: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        message = GenerateRequest.FromString(request(2))
        with grpc.insecure_channel(self.address) as channel:
            generate = pb_grpc.GenerationServiceStub(channel).Generate
            while not self._is_over.is_set():
                began_s = time.perf_counter()
                try:
                    for _ in generate(message, timeout=_CALL_S):
                        pass
                except grpc.RpcError as error:
                    self.errors.append(str(error.code()))
                self.seconds.append(time.perf_counter() - began_s)
                # The pause keeps the load of the probe low, because the latency of the front is to
                # be measured.
                self._is_over.wait(0.005)


def attacked(name: str, address: str, front: psutil.Process, floor_mib: float, s: float) -> Run:
    """Repeat the attack for `s` seconds and until the probe has made `_MIN_PROBES` calls."""
    before_s = cpu_s(front.pid)
    num, peak = 0, 0.0
    with Probe(address) as probe:
        until_s = time.monotonic() + s
        while (left_s := until_s - time.monotonic()) > 0 or (
            len(probe.seconds) < _MIN_PROBES and left_s > -_PATIENCE_S
        ):
            _program("chaos.attacks", name, address)
            peak = max(peak, _rss_mib(front))
            num += 1
    growth = settled_growth_mib(front, floor_mib)
    ordered = sorted(probe.seconds)
    run = Run(
        attack=name,
        num_attacks=num,
        num_probes=len(ordered),
        num_errors=len(probe.errors),
        p50_ms=ordered[len(ordered) // 2] * 1e3,
        p99_ms=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
        max_ms=ordered[-1] * 1e3,
        front_cpu_s=cpu_s(front.pid) - before_s,
        rss_peak=peak,
        growth=growth,
    )
    progress(f"{name}: p99 {run.p99_ms:.1f} ms, {run.num_errors} errors")
    return run


def settled_growth_mib(front: psutil.Process, floor_mib: float) -> float:
    """Return the memory growth, MiB, after the front has had time to free memory."""
    growth = _rss_mib(front) - floor_mib
    for _ in range(20):
        if growth <= MAX_GROWTH_MIB:
            break
        time.sleep(0.5)
        growth = _rss_mib(front) - floor_mib
    return growth


def malformed(address: str, num_calls: int) -> dict[str, Any]:
    """Send mutated messages to every method; return the number of calls by status."""
    found: dict[str, Any] = json.loads(_program("fuzz.wire", address, str(num_calls)))
    return found


def _program(module: str, *args: str) -> str:
    path = os.pathsep.join((str(_TESTS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60 * _PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout


def _rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def checks_of(runs: list[Run], ends: dict[str, Any]) -> list[Check]:
    """Return the checks: the probe's latency under each attack, then the memory growth after all
    attacks.
    """
    checks = [
        at_most(
            f"probe p99 during {run.attack}",
            run.p99_ms,
            MAX_PROBE_P99_MS,
            "ms",
            is_settled=run.num_probes >= _MIN_PROBES,
        )
        for run in runs
    ]
    codes: dict[str, int] = ends["codes"]
    bugs = sum(codes.get(name, 0) for name in ("UNKNOWN", "INTERNAL", "UNAVAILABLE"))
    checks += [
        at_most("probe errors", sum(run.num_errors for run in runs), 0, "calls"),
        at_most("growth after all attacks", runs[-1].growth, MAX_GROWTH_MIB, "MiB"),
        at_most("malformed messages that found a bug", bugs, 0, "calls"),
        at_most("malformed messages with an odd end", len(ends["odd"]), 0, "calls"),
    ]
    return checks


def measure(*, is_full: bool) -> tuple[list[Run], dict[str, Any]]:
    """Run all attacks on one service, then send malformed messages; return the results of the
    attacks, and the number of malformed calls by status."""
    options = (*simulated(0.002), *capacity(1024, 900), *MEASURED)
    limits = ("--handshake-timeout-s", "2", "--max-reader-stall-s", "2", "--max-arrival-s", "5")
    with service(*options, *limits) as found:
        address, front = found.address, psutil.Process(found.pids("front")[0])
        # Warm-up, for memory that a front allocates only once.
        _program("chaos.attacks", "rapid_reset", address)
        with Probe(address) as probe:
            while len(probe.seconds) < 100:
                time.sleep(0.05)
        floor_mib = _rss_mib(front)
        duration_s = 20.0 if is_full else 3.0
        runs = [attacked(name, address, front, floor_mib, duration_s) for name in ATTACKS]
        ends = malformed(address, MALFORMED if is_full else MALFORMED // 20)
    return runs, ends


def main() -> None:
    args = arguments("The effect of abusive clients on other clients.").parse_args()
    runs, ends = measure(is_full=args.full)
    header = ("attack", "times", "probes", "errors", "p50 ms", "p99 ms", "max ms")
    rows = [
        (r.attack, r.num_attacks, r.num_probes, r.num_errors, r.p50_ms, r.p99_ms, r.max_ms)
        for r in runs
    ]
    print_table("Probes while one connection attacks", header, rows)
    memory = [(r.attack, r.front_cpu_s, r.rss_peak, r.growth) for r in runs]
    print_table("The front", ("attack", "CPU s", "peak MiB", "growth MiB"), memory)
    print_table("Malformed messages", ("ended", "calls"), sorted(ends["codes"].items()))
    checks = checks_of(runs, ends)
    print_checks(checks)
    results = {"runs": [asdict(run) for run in runs], "malformed": ends}
    write_json(args.json, results, checks)


if __name__ == "__main__":
    main()
