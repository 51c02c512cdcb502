"""Measures the engine's steps, prefill and complete workloads on a GPU, without a service.

In the names of figures and in timelines, a "turn" is one call of `Engine.step` (plan, launch,
collect, events), as in the engine process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_models import VOCAB_SIZE
from penstock.executor.config import ExecutorConfig
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed, StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import RequestSpec, SamplingParams

BUDGET = 8192
"""Token budget of a step, chosen for throughput; a service that streams to clients uses a smaller
one.
"""
CONTEXT = 640
MAX_SEQ_LEN = 34_816
NUM_WARM, NUM_TIMED = 20, 80
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0)
_MAX_STEPS = 5_000
_NUM_PROFILED, _FIRST, _LAST = 8, 4, 5
"""Number of profiled steps, and the two in the middle that are kept, because the profiler's first
events are slow.
"""


def build(
    folder: Path,
    *,
    budget: int = BUDGET,
    num_seqs: int = 256,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
) -> Executor:
    """Build the executor that `penstock serve --device cuda` uses, with these settings."""
    return create_executor(
        ExecutorConfig(
            model_path=folder,
            device="cuda",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_seq_len=MAX_SEQ_LEN,
        )
    )


class Load:
    """Runs requests with random prompts on a new engine that uses `executor`."""

    def __init__(self, executor: Executor, *, budget: int = BUDGET) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_prefill_share=1.0,
            max_num_waiting=4096,
            deadline_admission=False,
        )
        self._engine = Engine(executor, config, time.monotonic)
        self._random = np.random.default_rng(0)
        self._num_ended = 0
        self._num_submitted = 0
        self._first_tokens: set[int] = set()

    def submit(self, count: int, num_prompt: int, num_new: int, sampling: SamplingParams) -> None:
        """Submit `count` requests together. Each generates exactly `num_new` tokens: it has no stop
        ids, or `min_tokens` prevents them from being sampled.
        """
        for _ in range(count):
            self._num_submitted += 1
            ids = self._random.integers(3, VOCAB_SIZE, num_prompt).astype(np.int32)
            spec = RequestSpec(
                key=self._num_submitted,
                request_id=str(self._num_submitted),
                prompt_ids=ids,
                max_tokens=num_new,
                # Bar the stop ids for the whole output, if the options have any.
                min_tokens=num_new if sampling.num_logprobs >= 0 else 0,
                stop_ids=(2,) if sampling.num_logprobs >= 0 else (),
                sampling=replace(sampling, seed=self._num_submitted),
                arrival_s=time.monotonic(),
            )
            self._engine.submit((spec,))

    def step(self) -> float:
        """Run one step with its events; return its duration, seconds."""
        start_s = time.perf_counter()
        events = self._engine.step()
        taken_s = time.perf_counter() - start_s
        self._note(events)
        return taken_s

    def run_until_all_decode(self) -> None:
        """Run steps until every request has its first token. Raises RuntimeError if they take more
        than 5,000 steps.
        """
        for _ in range(_MAX_STEPS):
            if len(self._first_tokens) == self._num_submitted:
                return
            self.step()
        raise RuntimeError("prompts are not computed")

    def drain(self) -> tuple[float, int]:
        """Run steps until no request is left; return seconds and number of steps."""
        start_s, num_steps = time.perf_counter(), 0
        while self._engine.has_work:
            self.step()
            num_steps += 1
        return time.perf_counter() - start_s, num_steps

    def stop(self) -> None:
        """Cancel the remaining requests, and run steps until none is left."""
        for key in range(1, self._num_submitted + 1):
            self._engine.cancel(key)
        self.drain()

    def _note(self, events: StepEvents) -> None:
        self._first_tokens.update(events.keys.tolist())
        for end in events.ends:
            if isinstance(end, Failed):
                raise RuntimeError(f"a request failed: {end}")


def decode_step_ms(
    executor: Executor, num_rows: int, sampling: SamplingParams, context: int
) -> float:
    """Return the median duration of a step of `num_rows` decodes with contexts of about `context`
    tokens, ms.
    """
    load = Load(executor)
    load.submit(num_rows, context - NUM_WARM - NUM_TIMED // 2, NUM_WARM + NUM_TIMED + 40, sampling)
    load.run_until_all_decode()
    for _ in range(NUM_WARM):
        load.step()
    turns = [load.step() for _ in range(NUM_TIMED)]
    load.stop()
    return statistics.median(turns) * 1e3


def mixed_step_ms(
    executor: Executor, num_rows: int, *, chunk: int = 512, past: int = 2048
) -> float:
    """Return the median duration, ms, of a step of `num_rows` decodes and one prefill chunk. About
    `past` tokens of the chunk's prompt are already computed.
    """
    load = Load(executor, budget=num_rows + chunk)
    load.submit(num_rows, CONTEXT - 100, 400, DRAWN)
    load.run_until_all_decode()
    turns: list[float] = []
    for _ in range(5):
        load.submit(1, past + 3 * chunk, 1, DRAWN)
        times = [load.step() for _ in range((past + 3 * chunk) // chunk + 1)]
        turns += times[past // chunk : past // chunk + 2]
    load.stop()
    return statistics.median(turns) * 1e3


def prefill_rate(executor: Executor, *, count: int = 48, length: int = 512) -> float:
    """Return the prefill throughput, tokens per second, of prompts that generate one token each;
    median of three.
    """

    def once() -> float:
        load = Load(executor)
        load.submit(count, length, 1, DRAWN)
        taken_s, _ = load.drain()
        return count * length / taken_s

    return _median(once)


def offline_rate(executor: Executor, *, count: int, num_prompt: int, num_new: int) -> float:
    """Return the output throughput, tokens per second, of requests that are all submitted at the
    start; mean of two runs.
    """

    def once() -> float:
        load = Load(executor)
        load.submit(count, num_prompt, num_new, DRAWN)
        taken_s, _ = load.drain()
        return count * num_new / taken_s

    return _median(once, times=2)


def first_tokens_ms(executor: Executor, *, count: int = 6) -> list[float]:
    """Return the TTFT, ms, of `count` requests that run one after another."""
    taken: list[float] = []
    for _ in range(count):
        load = Load(executor)
        start_s = time.perf_counter()
        load.submit(1, 512, 4, DRAWN)
        load.run_until_all_decode()
        taken.append((time.perf_counter() - start_s) * 1e3)
        load.drain()
    return taken


def _median(once: Callable[[], float], *, times: int = 3) -> float:
    values: Sequence[float] = [once() for _ in range(times)]
    return statistics.median(values)


def timeline(executor: Executor, num_rows: int) -> dict[str, Any]:
    """Profile a few steps with PyTorch's profiler; return the timeline of two of them.

    Times are microseconds since the start of the first of the two steps.

    Returns a dict with:
        num_rows: The number of decoding requests.
        names: The names of the kernels.
        turns: (step number, start, duration) of each step.
        kernels: (index into `names`, start, duration) of each kernel that began during the steps.
    """
    load = Load(executor)
    load.submit(num_rows, CONTEXT - NUM_WARM, 2 * NUM_WARM + 2 * _NUM_PROFILED, DRAWN)
    load.run_until_all_decode()
    for _ in range(NUM_WARM):
        load.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for turn in range(_NUM_PROFILED):
            with record_function(f"turn {turn}"):
                load.step()
        torch.cuda.synchronize()
    load.stop()
    turns: list[tuple[int, float, float]] = []
    kernels: list[tuple[str, float, float]] = []
    for event in found.events() or ():
        begun, length = event.time_range.start, event.time_range.elapsed_us()
        if event.device_type.name == "CUDA":
            if not event.name.startswith("turn "):  # the profiler also reports ranges there
                kernels.append((event.name, begun, length))
        elif event.name.startswith("turn "):
            turns.append((int(event.name[5:]), begun, length))
    kept = [turn for turn in turns if _FIRST <= turn[0] <= _LAST]
    origin, end = kept[0][1], kept[-1][1] + kept[-1][2]
    inside = sorted((one for one in kernels if origin <= one[1] < end), key=lambda one: one[1])
    names = sorted({name for name, _, _ in inside})
    return {
        "num_rows": num_rows,
        "names": [name[:80] for name in names],
        "turns": [(turn, round(begun - origin, 1), round(took, 1)) for turn, begun, took in kept],
        "kernels": [
            (names.index(name), round(begun - origin, 1), round(took, 1))
            for name, begun, took in inside
        ],
    }
