"""Measures the maximum requests per second of one front (gRPC server process), without traces and
with a trace of every request.

Keeps 128 short requests in flight (four prompt tokens, four output tokens) on the simulated
executor, whose steps take no time; the load client is written in C++. Compares the service without
a collector, the service with a collector that receives all traces, and, with `--before DIR`, the
service of another checkout without a collector. All of them stay up, and get the load alternately.
Reports medians over the rounds, and ratios within a round. On a machine with few cores the rate
depends on all processes of the service, so the CPU time of each process is reported.

    python benchmarks/saturation.py [--before DIR] [--full] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import native_build
from report import Outcome, arguments, at_least, medians, over, print_rows, progress, run
from services import (
    MEASURED,
    Service,
    capacity,
    line_of,
    process,
    request,
    run_client,
    service,
    simulated,
)

UNTRACED, TRACED, BEFORE = "untraced", "traced", "before"
NUM_TOKENS = 4
IN_FLIGHT = 128
MIN_TRACED, MIN_OVER_BEFORE = 0.97, 1.3
_ROOTS = ("protos", "scheduler", "executors", "server", "clients", "tools", "gateways")
_COLLECTOR = str(Path(__file__).with_name("tracing_peers.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The results of one run of one variant.

    `front_us`, `engine_us`, `observer_us`: CPU time of these processes per request, microseconds.
    `foreign_cores`: number of cores used by other processes meanwhile.
    """

    side: str
    per_s: float
    front_us: float
    engine_us: float
    observer_us: float
    foreign_cores: float


@contextlib.contextmanager
def services(before: Path | None) -> Generator[dict[str, Service]]:
    """Start the service of each variant; yield the services by name."""
    options = (*simulated(0.0), *capacity(512, 64), *MEASURED)
    with contextlib.ExitStack() as stack:
        collector = line_of(stack.enter_context(process(sys.executable, _COLLECTOR, "collector")))
        endpoint = f"http://127.0.0.1:{int(collector)}"
        sides = {
            UNTRACED: stack.enter_context(service(*options)),
            TRACED: stack.enter_context(service(*options, "--otlp-endpoint", endpoint)),
        }
        if before is not None:
            path = os.pathsep.join(str(before / root) for root in _ROOTS)
            # Older checkouts have no `tools` folder.
            module = "penstock.tools" if (before / "tools").exists() else "penstock.server.cli"
            environment = {**os.environ, "PYTHONPATH": path}
            renamed = [_name_in(before, word) for word in options]
            sides[BEFORE] = stack.enter_context(
                service(*renamed, environment=environment, module=module)
            )
        yield sides


def _name_in(before: Path, option: str) -> str:
    """Return the name of an option in the other checkout, where it may be an older name."""
    if option != "--deadline-admission":
        return option
    sources = (before / "server").rglob("*.py")
    is_there = any("deadline_admission" in source.read_text() for source in sources)
    return option if is_there else "--foresee-deadlines"


def run_variant(side: str, service: Service, seed: int, window_s: float) -> RunResult:
    """Run one closed loop; return the results. Raises RunFailed."""
    load: dict[str, object] = {"streams": 0, "connections": 4, "concurrency": IN_FLIGHT}
    times: dict[str, object] = {"warm": 1.0, "window": window_s, "drain": 10.0, "seed": seed}
    pids = [pid for role in ("front", "engine", "observer") for pid in service.pids(role)]
    listed_pids = ",".join(map(str, pids))
    where: dict[str, object] = {
        "port": service.port,
        "pids": listed_pids,
        "request": request(NUM_TOKENS),
    }
    found = run_client("arrive", {**load, **times, **where})
    span_s = (found["end_ns"] - found["start_ns"]) * 1e-9
    num, cpu_s = max(1, found["num_finished"]), (*found["cpu_s"], 0.0)
    other_s = found["machine_s"] - sum(cpu_s) - found["client_s"]
    measured = RunResult(
        side=side,
        per_s=found["num_finished"] / span_s,
        front_us=cpu_s[0] * 1e6 / num,
        engine_us=cpu_s[1] * 1e6 / num,
        observer_us=cpu_s[2] * 1e6 / num,
        foreign_cores=max(0.0, other_s / span_s),
    )
    progress(f"{side:<9} {measured.per_s:7,.0f} requests/s  {measured.front_us:6.0f} us")
    return measured


def measure(options: Namespace) -> Outcome:
    """Run all rounds, the variants alternating; the first round is warm-up."""
    native_build.load_client()
    num_rounds, window_s = (7, 8.0) if options.full else (3, 4.0)
    with services(options.before) as sides:
        rounds = [
            [run_variant(name, side, number, window_s) for name, side in sides.items()]
            for number in range(num_rounds + 1)
        ]
    runs = [one for each in rounds[1:] for one in each]
    print_rows(f"One front, {IN_FLIGHT} in flight, {NUM_TOKENS} tokens each", medians(runs, "side"))
    untraced, traced, before = (
        [one for one in runs if one.side == side] for side in (UNTRACED, TRACED, BEFORE)
    )
    name = "traced over untraced, requests/s"
    checks = [at_least(name, over(traced, untraced, "per_s"), MIN_TRACED, "x")]
    if before:
        name = "untraced over before, requests/s"
        checks.append(at_least(name, over(untraced, before, "per_s"), MIN_OVER_BEFORE, "x"))
    return runs, checks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout to compare")
    run(parser, measure)


if __name__ == "__main__":
    main()
