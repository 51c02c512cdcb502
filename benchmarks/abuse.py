"""Measures the effect of several attacks and of malformed messages on a well-behaved client.

Runs a service with the simulated executor and one front (gRPC server process). A probe sends short
requests one after another on a separate connection, while an attack runs repeatedly in a separate
process. Reports the latencies and errors of the probe, the memory of the front process after the
attack, and the results of calls of all methods with mutated messages. At the end no process may
have restarted and no KV block may be in use.

    python benchmarks/abuse.py [--full] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from penstock.client import NO_RETRY, PenstockError, SyncClient, TokenPrompt
from report import Check, Outcome, arguments, at_most, percentile_ms, print_rows, progress, run
from services import MEASURED, capacity, cpu_s, service, simulated
from survival_cancels import used_blocks

ATTACKS = (
    *("rapid_reset", "open_and_hang", "settings_flood", "ping_flood", "empty_data"),
    *("continuation_flood", "window_updates", "garbage", "bad_frames", "compression_bomb"),
    *("huge_metadata", "huge_messages", "half_sent_messages", "unknown_fields", "zero_windows"),
    "idle_connections",
)
MAX_PROBE_P99_MS = 200.0
MAX_GROWTH_MIB = 20.0
MALFORMED = 100_000
_TESTS = Path(__file__).resolve().parents[1] / "tests"
_TIMEOUT_S = 60.0
_CALL_S = 30.0
_MIN_PROBES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """The result of one attack: latencies of the probe's calls, CPU time and memory of the front.

    `peak_mib`: largest resident memory measured during the attack. `growth_mib`: memory after the
    attack less that before all attacks.
    """

    attack: str
    num_attacks: int
    num_probes: int
    num_errors: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    front_cpu_s: float
    peak_mib: float
    growth_mib: float


@dataclass
class Probe:
    """The well-behaved client: a context manager that sends short requests from a thread, because
    the main thread waits for the attacks.
    """

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
        prompt = TokenPrompt(ids=(5, 6, 7, 8))
        with SyncClient(self.address, retry=NO_RETRY) as client:
            # The pause keeps the load of the probe low, because the latency of the front is to be
            # measured.
            while not self._is_over.wait(0.005):
                began_s = time.perf_counter()
                try:
                    for _ in client.generate(
                        prompt, max_tokens=2, ignore_eos=True, deadline_s=_CALL_S
                    ):
                        pass
                except PenstockError as error:
                    self.errors.append(str(error))
                self.seconds.append(time.perf_counter() - began_s)


def run_attack(
    name: str, address: str, front: psutil.Process, baseline_mib: float, duration_s: float
) -> Attack:
    """Repeat the attack for `duration_s` seconds and until the probe has made `_MIN_PROBES` calls,
    at most `_TIMEOUT_S` seconds longer; return the results. `baseline_mib`: resident memory before
    all attacks.
    """
    before_s = cpu_s(front.pid)
    num, peak_mib = 0, 0.0
    with Probe(address) as probe:
        until_s = time.monotonic() + duration_s
        while (left_s := until_s - time.monotonic()) > 0 or (
            len(probe.seconds) < _MIN_PROBES and left_s > -_TIMEOUT_S
        ):
            _run_module("chaos.attacks", name, address)
            peak_mib = max(peak_mib, _rss_mib(front))
            num += 1
    growth_mib = _settled_growth_mib(front, baseline_mib)
    found = Attack(
        attack=name,
        num_attacks=num,
        num_probes=len(probe.seconds),
        num_errors=len(probe.errors),
        p50_ms=percentile_ms(probe.seconds, 50),
        p99_ms=percentile_ms(probe.seconds, 99),
        max_ms=percentile_ms(probe.seconds, 100),
        front_cpu_s=cpu_s(front.pid) - before_s,
        peak_mib=peak_mib,
        growth_mib=growth_mib,
    )
    progress(f"{name}: p99 {found.p99_ms:.1f} ms, {found.num_errors} errors")
    return found


def _settled_growth_mib(front: psutil.Process, baseline_mib: float) -> float:
    """Return the memory growth over `baseline_mib`, MiB, after up to 10 s for the front to free
    memory.
    """
    for _ in range(20):
        if _rss_mib(front) - baseline_mib <= MAX_GROWTH_MIB:
            break
        time.sleep(0.5)
    return _rss_mib(front) - baseline_mib


def _run_module(module: str, *args: str) -> str:
    path = os.pathsep.join((str(_TESTS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60 * _TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout


def _rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def checks_of(
    found: list[Attack], ends: dict[str, Any], num_errors: int, num_restarts: int, leaked: int
) -> list[Check]:
    """Return the checks: the probe's latency under each attack and its errors, the results of the
    malformed calls (`ends`), and the state of the service at the end.
    """
    codes: dict[str, int] = ends["codes"]
    bugs = sum(codes.get(name, 0) for name in ("UNKNOWN", "INTERNAL", "UNAVAILABLE"))
    malformed = f"{sum(codes.values()):,} malformed messages"
    return [
        *(
            at_most(
                f"probe p99 during {one.attack}",
                one.p99_ms,
                *(MAX_PROBE_P99_MS, "ms"),
                is_settled=one.num_probes >= _MIN_PROBES,
            )
            for one in found
        ),
        at_most("probe errors", sum(one.num_errors for one in found), 0, "calls"),
        at_most("growth after all attacks", found[-1].growth_mib, MAX_GROWTH_MIB, "MiB"),
        at_most(f"{malformed}: that found a bug", bugs, 0, "calls"),
        at_most(f"{malformed}: with an odd end", len(ends["odd"]), 0, "calls"),
        at_most(f"{malformed}: probe errors meanwhile", num_errors, 0, "calls"),
        at_most("after attacks and malformed messages: crashes", num_restarts, 0, "processes"),
        at_most("after attacks and malformed messages: blocks leaked", leaked, 0, "blocks"),
    ]


def measure(options: Namespace) -> Outcome:
    """Run all attacks on one service, then send malformed messages."""
    sizes = (*simulated(0.002), *capacity(1024, 900), *MEASURED)
    limits = ("--handshake-timeout-s", "2", "--max-reader-stall-s", "2", "--max-arrival-s", "5")
    with service(*sizes, *limits, has_operations=True) as serving:
        pids = [serving.pids(role) for role in ("front", "engine")]
        address, front = serving.address, psutil.Process(pids[0][0])
        # Warm-up, for memory that a front allocates only once.
        _run_module("chaos.attacks", "rapid_reset", address)
        with Probe(address) as probe:
            while len(probe.seconds) < 100:
                time.sleep(0.05)
        baseline_mib = _rss_mib(front)
        duration_s = 20.0 if options.full else 3.0
        found = [run_attack(name, address, front, baseline_mib, duration_s) for name in ATTACKS]
        num_calls = MALFORMED if options.full else MALFORMED // 20
        with Probe(address) as probe:
            ends: dict[str, Any] = json.loads(_run_module("fuzz.wire", address, str(num_calls)))
        leaked = asyncio.run(used_blocks(serving.operations))
        num_new = sum(
            serving.pids(role) != old for role, old in zip(("front", "engine"), pids, strict=True)
        )
    print_rows("Probes while one connection attacks", found)
    print_rows("Malformed messages", [ends["codes"]])
    checks = checks_of(found, ends, len(probe.errors), num_new, leaked)
    return {"runs": found, "malformed": ends}, checks


if __name__ == "__main__":
    run(arguments(__doc__), measure)
