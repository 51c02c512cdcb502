"""Measures the scheduler's time per step without a model: `schedule` and `update`, microseconds.

Measures two loads. In one, all requests decode. The other is a closed loop in which every finished
request is replaced (prompts of 64 to 512 tokens, outputs of 64 to 192, a budget of 2048 tokens).
Prefix caching is always enabled; prompt lengths differ, so that in every step some requests need a
new block. Then compares two orders of the queue in a closed loop with 1,000 waiting requests: FCFS,
and the fair order with tenants, priorities, ageing, predicted deadlines and an ITL target (the fit
of the cost model is part of the step). Both run in one process, alternating step by step. The fair
order is also measured with 100 and 10,000 waiting requests.
"""

import gc
import itertools
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import EvictionPolicy, SchedulerConfig, SchedulingOrder
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import NO_TIME, RequestSpec
from report import Outcome, arguments, at_most, print_rows, progress, run

BLOCK_SIZE = 16
ROOT = chain_root(b"benchmark")
GOALS_US = {256: 60.0, 1024: 150.0}
MAX_FAIR_RATIO = 1.3
MAX_QUEUE_RATIO = 1.15
NUM_TENANTS = 32
COST = CostModel()
TARGET_ITL_S = 0.1
"""ITL target, seconds: above the step times of the loop, so that both orders do the same work."""


def _true_s(batch: Batch) -> float:
    """Return the simulated duration of the step, seconds, to which the cost model is fitted."""
    num_prefill = int(batch.num_tokens[batch.num_decodes :].sum())
    return COST.step_time_s(
        num_prefill_tokens=num_prefill,
        num_decodes=batch.num_decodes,
        num_context_tokens=int(batch.starts.sum()) + batch.num_decodes + num_prefill,
    )


@dataclass(frozen=True, slots=True)
class _NoExecutor:
    """An executor with limits but no steps: the benchmark creates the results."""

    info: ExecutorInfo
    ready_fd: int | None = None

    def launch(self, batch: Batch) -> None:
        raise NotImplementedError

    def collect(self) -> StepResult:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Requests:
    """Creates random requests with hashed prompts, as a front (gRPC server process) does."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._key = 0

    def make(self, num_prompt: int, max_tokens: int, **options: Any) -> RequestSpec:
        """Return a request with a unique prompt."""
        self._key += 1
        ids = self._random.integers(300, 8000, num_prompt).astype(np.int32)
        return RequestSpec(
            key=self._key,
            request_id=str(self._key),
            prompt_ids=ids,
            max_tokens=max_tokens,
            stop_ids=(2,),
            hash_salt=b"benchmark",
            block_hashes=hash_blocks(ids, BLOCK_SIZE, ROOT),
            **options,
        )

    def make_any(self) -> RequestSpec:
        """Return a request of one of many tenants, with one of three priorities; half of the
        requests have a deadline."""
        now = time.monotonic()
        return self.make(
            self.between(64, 512),
            self.between(64, 192),
            tenant=f"tenant-{self.between(1, NUM_TENANTS)}",
            priority=self.between(-1, 1),
            arrival_s=now - self.between(0, 60),
            deadline_s=now + self.between(600, 900) if self.between(0, 1) else NO_TIME,
        )

    def between(self, low: int, high: int) -> int:
        """Return a uniform integer, both ends included."""
        return int(self._random.integers(low, high + 1))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measurement of one step: nanoseconds of `schedule` and of `update`, and numbers of tokens
    and of requests that ended.
    """

    schedule_ns: int
    update_ns: int
    num_tokens: int
    num_ended: int


class Bench:
    """A scheduler with as many slots as running requests, driven without an executor."""

    def __init__(
        self,
        num_running: int,
        budget: int,
        max_seq_len: int,
        depth: int,
        order: SchedulingOrder = SchedulingOrder.FAIR,
        *,
        has_all: bool = False,
    ) -> None:
        info = ExecutorInfo(
            name="none",
            vocab_size=8192,
            block_size=BLOCK_SIZE,
            num_blocks=num_running * (max_seq_len // BLOCK_SIZE),
            max_seq_len=max_seq_len,
            max_num_seqs=num_running,
            pipeline_depth=depth,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_waiting=1_000_000,
            max_num_waiting_tokens=1_000_000_000,
            order=order,
            deadline_admission=has_all,
            eviction=EvictionPolicy.HIT_DENSITY if has_all else EvictionPolicy.LRU,
            target_itl_s=TARGET_ITL_S if has_all else None,
            known_cost=COST if has_all else None,
        )
        self._has_all = has_all
        self.engine = Engine(_NoExecutor(info), config, time.monotonic)
        self._depth = depth
        self._launched: list[Batch] = []

    def step(self) -> StepTimes | None:
        """Schedule a step, and update the scheduler with the result of the oldest step in the
        pipeline; return the measurement, or None while the pipeline fills.
        """
        now = time.monotonic()
        t0 = time.perf_counter_ns()
        batch = self.engine.schedule(now)
        t1 = time.perf_counter_ns()
        assert batch is not None
        self._launched.append(batch)
        if len(self._launched) < self._depth:
            return None
        oldest = self._launched.pop(0)
        tokens = np.full(len(oldest.sampled_slots), 7, dtype=np.int32)
        result = StepResult(slots=oldest.sampled_slots, tokens=tokens)
        seconds = _true_s(oldest)
        t2 = time.perf_counter_ns()
        if self._has_all:
            self.engine.note_duration(oldest, seconds, now)
        self.engine.update(result, now)
        events = self.engine.events.take(batch.step, now)
        t3 = time.perf_counter_ns()
        return StepTimes(t1 - t0, t3 - t2, int(batch.num_tokens.sum()), len(events.ends))

    def measure(self, num_steps: int) -> list[StepTimes]:
        """Run steps and return their measurements; long-lived objects are excluded from garbage
        collection, as in a server.
        """
        gc.collect()
        gc.freeze()
        found = [self.step() for _ in range(num_steps)]
        gc.unfreeze()
        return [one for one in found if one is not None]


def decode(num_running: int, num_steps: int, depth: int) -> list[StepTimes]:
    """Run a load in which every request decodes; return the measured steps."""
    bench, requests = Bench(num_running, max(8192, num_running), 4096, depth), Requests(1)
    for _ in range(num_running):
        bench.engine.submit_at((requests.make(requests.between(200, 300), 3500),), 0.0)
    _fill(bench, num_running)
    return bench.measure(num_steps)


def closed_loop(num_running: int, num_steps: int, depth: int) -> list[StepTimes]:
    """Run a load in which every finished request is replaced, so that steps have admissions,
    prefill chunks and ends; return the measured steps.
    """
    bench, requests = Bench(num_running, 2048, 1024, depth), Requests(3)
    measurements: list[StepTimes] = []

    def arrive(count: int) -> None:
        for _ in range(count):
            spec = requests.make(requests.between(64, 512), requests.between(64, 192))
            bench.engine.submit_at((spec,), 0.0)

    arrive(num_running)
    for step in range(300 + num_steps):
        if step == 300:
            measurements.clear()
            gc.collect()
            gc.freeze()
        measurement = bench.step()
        if measurement is not None:
            measurements.append(measurement)
            arrive(measurement.num_ended)
    gc.unfreeze()
    return measurements


def queues(
    cases: list[tuple[SchedulingOrder, int]], num_steps: int
) -> dict[tuple[SchedulingOrder, int], list[StepTimes]]:
    """Return the steps of closed loops with 256 running requests, by order and number of waiting
    requests.

    The cases alternate step by step, so that other load on the machine affects all of them.
    """
    loops: list[tuple[Bench, Requests, list[StepTimes]]] = []
    for order, num_waiting in cases:
        has_all = order is SchedulingOrder.FAIR
        bench, requests = Bench(256, 2048, 1024, 1, order, has_all=has_all), Requests(4)
        for _ in range(256 + num_waiting):
            bench.engine.submit_at((requests.make_any(),), 0.0)
        loops.append((bench, requests, []))
    for step in range(300 + num_steps):
        if step == 300:
            gc.collect()
            gc.freeze()
        for bench, requests, measurements in loops:
            measurement = bench.step()
            if measurement is None:
                continue
            if step >= 300:
                measurements.append(measurement)
            for _ in range(measurement.num_ended):
                bench.engine.submit_at((requests.make_any(),), 0.0)
    gc.unfreeze()
    return {case: measurements for case, (_, _, measurements) in zip(cases, loops, strict=True)}


def step_us(measurements: list[StepTimes]) -> dict[str, float]:
    """Return the figures of a step: times in microseconds, numbers of tokens and of ends."""
    total_us = (
        np.array([measurement.schedule_ns + measurement.update_ns for measurement in measurements])
        / 1e3
    )
    return {
        "schedule_us_p50": float(
            np.median([measurement.schedule_ns for measurement in measurements])
        )
        / 1e3,
        "update_us_p50": float(np.median([measurement.update_ns for measurement in measurements]))
        / 1e3,
        "total_us_p50": float(np.median(total_us)),
        "total_us_mean": float(total_us.mean()),
        "total_us_p99": float(np.percentile(total_us, 99)),
        "tokens_per_step": float(np.mean([measurement.num_tokens for measurement in measurements])),
        "ends_per_step": float(np.mean([measurement.num_ended for measurement in measurements])),
    }


def measure_order(num_steps: int) -> Outcome:
    """Measure the cost of the fair order, and the effect of a long queue on it."""
    fair, fcfs = SchedulingOrder.FAIR, SchedulingOrder.FCFS
    cases = [(fcfs, 1000), (fair, 1000), (fair, 100), (fair, 10_000)]
    found = {case: step_us(measurements) for case, measurements in queues(cases, num_steps).items()}
    rows = [
        {"order": order.value, "waiting": num_waiting, **found[order, num_waiting]}
        for order, num_waiting in cases
    ]
    print_rows("The order of the queue, 256 running, closed loop", rows)

    def ratio(figure: str, one: tuple[Any, int], other: tuple[Any, int]) -> float:
        return found[one][figure] / found[other][figure]

    name = "256 running, 1,000 waiting, fair against FCFS"
    queue = "a queue of 10,000 against one of 100: median"
    return rows, [
        *(
            at_most(f"{name}: {kind}", ratio(figure, cases[1], cases[0]), MAX_FAIR_RATIO, "x")
            for kind, figure in (("median", "total_us_p50"), ("mean", "total_us_mean"))
        ),
        at_most(queue, ratio("total_us_p50", cases[3], cases[2]), MAX_QUEUE_RATIO, "x"),
    ]


def _fill(bench: Bench, num_running: int) -> None:
    while len(bench.engine.running) < num_running:
        bench.step()
    for _ in range(40):
        bench.step()


def measure(options: Namespace) -> Outcome:
    """Run both loads at every size, then compare the orders."""
    num_steps = 3000 if options.full else 600
    loads = {"decode": decode, "closed loop": closed_loop}
    rows: list[dict[str, Any]] = []
    for depth, load, num_running in itertools.product((1, 2), loads, (32, 128, 256, 512, 1024)):
        found = step_us(loads[load](num_running, num_steps, depth))
        rows.append({"load": load, "depth": depth, "running": num_running, **found})
        progress(f"{load}, depth {depth}, {num_running} running")
    print_rows("Scheduler, host microseconds a step (prefix caching on)", rows)
    order_rows, order_checks = measure_order(4 * num_steps)
    checks = [
        at_most(
            f"decode of {row['running']}, depth {row['depth']}: schedule + update, median",
            row["total_us_p50"],
            *(GOALS_US[row["running"]], "us"),
        )
        for row in rows
        if row["load"] == "decode" and row["running"] in GOALS_US
    ]
    return [*rows, *order_rows], [*checks, *order_checks]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
