"""Measures the error of the simulator: simulates recorded requests, and compares the result with
the real run.

Runs `penstock serve --record` with the demo model on this machine and clients in an open loop, in
several parts with two alternating loads. The simulator replays each part with the service's
settings and a cost model calibrated on all other parts. Its figures are compared with the figures
that the clients measured, with the queue time and the TTFT that the server reports ("served TTFT"),
and with the recorded step times. An error is the ratio of simulated to real, minus one; its median
over the parts of a load is reported.

Other programs may slow down some of the parts, so their CPU use is reported.

    python benchmarks/simulation_check.py [--full] [--json FILE]
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from load import LoadRequest, RequestOutcome, open_loop, sending
from penstock.client import NO_RETRY, Client
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.own_service import OwnService
from penstock.tools.simulation.calibration import fit_cost, read_steps
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import simulate
from penstock.tools.simulation.summary import summarise
from penstock.tools.simulation.trace_files import read_trace
from report import Check, Outcome, arguments, at_most, percentile_ms, print_rows, progress, run
from services import machine_s

Counts: TypeAlias = NDArray[np.float64]
Seconds: TypeAlias = NDArray[np.float64]

VOCAB_SIZE = 2048
MAX_NUM_SEQS = 16
NUM_BLOCKS = 1024
MAX_SEQ_LEN = 1024
LOADS = (0.4, 0.9)
START_S = 60.0
TIMEOUT_S = 120.0
_PREFIX_TOKENS, _SHARED = 64, 0.3
SERVICE = (
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--num-blocks", str(NUM_BLOCKS)),
    # The other cores are used by the front and the clients.
    *("--max-seq-len", str(MAX_SEQ_LEN), "--fronts", "1", "--threads", "1"),
)
STEP = "mean step"
GOALS = {"tokens/s": 0.05, "TTFT p50": 0.15, "TTFT p99": 0.25, "ITL p50": 0.15, "total p50": 0.15}
"""Maximum error of each figure, at every load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a run: the requests as sent, the clients' results, and the recorded requests and
    steps.
    """

    sent: list[LoadRequest]
    seen: list[RequestOutcome]
    requests: list[TraceRequest]
    steps: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The figures of one part by name, in milliseconds or tokens per second.

    `real`: of the real run. `simulated`: of the simulation, with a cost model fitted to the other
    parts.
    """

    load: float
    real: Mapping[str, float]
    simulated: Mapping[str, float]

    def error(self, name: str) -> float:
        """Return the ratio of simulated to real, minus one."""
        return self.simulated[name] / self.real[name] - 1.0


def poisson(rate_per_s: float, duration_s: float, seed: int) -> list[LoadRequest]:
    """Return requests with Poisson arrivals and lognormal lengths: prompts of 32 to 500 tokens,
    some with a shared prefix, and outputs of 8 to 200 tokens."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(3, VOCAB_SIZE, (4, _PREFIX_TOKENS))
    sent: list[LoadRequest] = []
    at_s = random.exponential(1.0 / rate_per_s)
    while at_s < duration_s:
        num_prompt = int(np.clip(random.lognormal(4.8, 0.7), 32, 500))
        ids = random.integers(3, VOCAB_SIZE, num_prompt)
        if random.random() < _SHARED and num_prompt > _PREFIX_TOKENS:
            ids[:_PREFIX_TOKENS] = prefixes[random.integers(len(prefixes))]
        num_tokens = int(np.clip(random.lognormal(3.7, 0.6), 8, 200))
        sent.append(LoadRequest(at_s=at_s, ids=tuple(ids.tolist()), num_tokens=num_tokens))
        at_s += random.exponential(1.0 / rate_per_s)
    return sent


class RecordedService:
    """Sends the parts of the run, one at a time, to a service that records them."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._num_requests = 0
        self._num_steps = 0

    async def run_part(self, rate_per_s: float, duration_s: float, seed: int) -> Part:
        """Send the requests of one part; return the part when its recording is written."""
        sent = poisson(rate_per_s, duration_s, seed)
        seen = await open_loop(sent, sending(self._client))
        before = self._num_requests
        self._num_requests += len(sent)
        requests = await self._recorded()
        first, self._num_steps = self._num_steps, _num_lines(self._folder / "steps.jsonl")
        steps = slice(first, self._num_steps)
        return Part(sent=sent, seen=seen, requests=requests[before:], steps=steps)

    async def _recorded(self) -> list[TraceRequest]:
        path = self._folder / "requests.jsonl"
        async with asyncio.timeout(TIMEOUT_S):
            while _num_lines(path) < self._num_requests:  # noqa: ASYNC110 - no event reports it
                await asyncio.sleep(0.1)
        return list(read_trace(path))


async def all_parts(folder: Path, num_runs: int, duration_s: float) -> list[Part]:
    """Send two bursts, the second of which measures the capacity; then run the parts with
    alternating loads, and return them.
    """
    parts: list[Part] = []
    async with (
        OwnService(("--record", str(folder), *SERVICE), start_timeout_s=START_S) as service,
        Client(service.address, retry=NO_RETRY) as client,
    ):
        recorded = RecordedService(client, folder)
        # Submit everything at once, twice: the first steps are slow; the second time shows the
        # capacity.
        await recorded.run_part(200.0, 0.3, seed=1)
        burst = await recorded.run_part(200.0, 0.5, seed=2)
        capacity_per_s = len(burst.sent) / max(seen.total_s for seen in burst.seen)
        progress(f"capacity about {capacity_per_s:.1f} requests/s")
        for number in range(num_runs):
            for load in LOADS:
                part = await recorded.run_part(load * capacity_per_s, duration_s, seed=10 + number)
                parts.append(part)
    return parts


def compare(parts: list[Part], counts: Counts, seconds: Seconds) -> list[Comparison]:
    """Compare every part with its simulation; return the comparisons. All recorded steps: `counts`
    [n, 3] (prefill tokens, decodes, context tokens) and `seconds` [n] (durations).
    """
    comparisons: list[Comparison] = []
    for index, part in enumerate(parts):
        is_others = np.zeros(len(seconds), dtype=np.bool_)
        for other in parts:
            is_others[other.steps] = other is not part
        fit = fit_cost(counts[is_others], seconds[is_others])
        simulated = simulated_figures(part, fit.cost, front_without(part, parts))
        comparisons.append(
            Comparison(
                load=LOADS[index % len(LOADS)],
                real={**real_figures(part), STEP: float(seconds[part.steps].mean()) * 1e3},
                simulated=simulated | {STEP: mean_step_ms(fit.cost, counts[part.steps])},
            )
        )
    return comparisons


def mean_step_ms(cost: CostModel, counts: Counts) -> float:
    """Return the mean step time that the cost model predicts for these steps, ms."""
    coefficients = (cost.prefill_token_s, cost.decode_slot_s, cost.context_token_s)
    return (cost.step_s + float((counts @ np.array(coefficients)).mean())) * 1e3


def real_figures(part: Part) -> dict[str, float]:
    """Return the figures of the real run: the queue time and the served TTFT as the server reported
    them, the others as the clients measured them.
    """
    seen = part.seen
    duration_s = max(
        request.at_s + one.total_s for request, one in zip(part.sent, seen, strict=True)
    ) - min(request.at_s for request in part.sent)
    num_tokens = sum(request.num_tokens for request in part.sent)
    return {
        "tokens/s": num_tokens / duration_s,
        **_percentiles("TTFT", [one.ttft_s or 0.0 for one in seen], (50, 90, 99)),
        **_percentiles("served TTFT", [one.served_ttft_s for one in seen], (50, 99)),
        **_percentiles("queue", [one.queue_s for one in seen], (50, 90)),
        **_percentiles("ITL", [gap for one in seen for gap in one.gaps_s], (50, 99)),
        **_percentiles("total", [one.total_s for one in seen], (50, 99)),
    }


def front_without(part: Part, parts: list[Part]) -> float:
    """Return how much longer the TTFT is at the client than in the server's report, in seconds:
    the median over the requests of all parts except `part`.
    """
    return statistics.median(
        (one.ttft_s or 0.0) - one.served_ttft_s
        for other in parts
        if other is not part
        for one in other.seen
    )


def simulated_figures(part: Part, cost: CostModel, front_s: float) -> dict[str, float]:
    """Simulate the requests of `part`; return the figures. `front_s`: see `front_without`."""
    start_s = part.requests[0].arrival_s
    trace = [
        msgspec.structs.replace(one, arrival_s=one.arrival_s - start_s) for one in part.requests
    ]
    config = SimulationConfig(
        policy=BatchingPolicy.FAIR,
        cost=cost,
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=NUM_BLOCKS,
        max_seq_len=MAX_SEQ_LEN,
        scheduler=SchedulerConfig(),
        front_s=front_s,
    )
    done = simulate(trace, config)
    table, summary = done.recorder.table, summarise(done)
    arrival_s = table.seconds("arrival_s")
    ttft_s = table.seconds("first_token_s") - arrival_s
    return {
        "tokens/s": summary.output_tokens_per_s,
        **_percentiles("TTFT", (ttft_s + front_s).tolist(), (50, 90, 99)),
        **_percentiles("served TTFT", ttft_s.tolist(), (50, 99)),
        **_percentiles("queue", (table.seconds("admitted_s") - arrival_s).tolist(), (50, 90)),
        "ITL p50": summary.itl.p50_s * 1e3,
        "ITL p99": summary.itl.p99_s * 1e3,
        **_percentiles("total", (table.seconds("end_s") - arrival_s + front_s).tolist(), (50, 99)),
    }


def report(comparisons: list[Comparison]) -> list[Check]:
    """Print the medians; return the checks."""
    checks: list[Check] = []
    for load in LOADS:
        runs = [one for one in comparisons if one.load == load]
        rows: list[dict[str, object]] = []
        for name in runs[0].real:
            errors = [one.error(name) for one in runs]
            error = statistics.median(errors)
            rows.append(
                {
                    "figure": name,
                    "real": statistics.median(one.real[name] for one in runs),
                    "simulated": statistics.median(one.simulated[name] for one in runs),
                    "error": f"{error:+.1%}",
                    "of the runs": f"{min(errors):+.0%} .. {max(errors):+.0%}",
                }
            )
            if name in GOALS:
                title = f"{name} at {load:.0%} load, off by"
                checks.append(at_most(title, abs(error), GOALS[name], "of the real one"))
        print_rows(f"{load:.0%} of capacity, median of {len(runs)} runs (ms, tokens/s)", rows)
    return checks


def measure(options: Namespace) -> Outcome:
    """Run all parts, and compare each with its simulation."""
    num_runs, duration_s = (7, 20.0) if options.full else (3, 4.0)
    begun_s, busy_s, own_s = time.monotonic(), machine_s(), _own_s()
    with tempfile.TemporaryDirectory(prefix="penstock-record-") as name:
        folder = Path(name)
        parts = asyncio.run(all_parts(folder, num_runs, duration_s))
        others_s = machine_s() - busy_s - (_own_s() - own_s)
        others_share = max(0.0, others_s) / (time.monotonic() - begun_s) / (os.cpu_count() or 1)
        counts, seconds = read_steps(folder / "steps.jsonl")
    fit = fit_cost(counts[parts[0].steps.start :], seconds[parts[0].steps.start :])
    print(f"cost model of all parts: {fit}")
    comparisons = compare(parts, counts, seconds)
    checks = report(comparisons)
    print(f"\nother programs took {others_share:.0%} of the {os.cpu_count()} cores")
    results = {"calibration": fit, "others_share": others_share, "runs": comparisons}
    return results, checks


def _own_s() -> float:
    """Return the CPU time of this process and its ended children, seconds."""
    usages = (
        resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _percentiles(name: str, values_s: list[float], percents: tuple[int, ...]) -> dict[str, float]:
    return {f"{name} p{percent}": percentile_ms(values_s, percent) for percent in percents}


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    run(arguments(__doc__), measure)
