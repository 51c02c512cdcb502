"""Measures the cost, in a scheduler step, of two listeners of an engine: the flight recorder (the
last steps, in shared memory) and `--record`.

Two engines with an executor that takes no time, one with the listener and one without, alternate
step by step, so that other load on the machine affects both. The flight recorder is measured under
two loads: one in which all requests decode, and a closed loop that replaces each finished request
(prompts of 64 to 512 tokens, outputs of 64 to 192, a budget of 2048 tokens). `--record` is measured
while all requests decode. A step is `Engine.step`: the scheduler and the engine around it. Another
process reads the flight recorder four times per second, as the observer (the process that exports
metrics) does. The recorder of `--record` writes on a separate thread. The time of this thread for
the same steps, including the ends of all requests, is also reported.

    python benchmarks/listener_cost.py [--full] [--part flight|recording] [--json FILE]
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.flight.layout import facts_of
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.listeners import EngineListeners
from penstock.server.observe.recording.recorder import Recorder
from report import Outcome, arguments, at_most, medians, print_rows, run_parts
from services import expect_ready

BLOCK_SIZE = 16
MAX_SHARE = 0.03
GOAL_ENGINE_US = 10.0
GOAL_THREAD_US = 60.0
NUM_KEPT_STEPS = 4096
_ROOT = chain_root(b"benchmark")
_MAX_SEQ_LEN = 4096
_POLL_S = 0.25
_NUM_RECORDED = 240
_EXECUTOR_US = 5000.0
"""Duration of a short step of a real model, microseconds, to which the cost is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The duration of a step without the listener, and the time that the listener adds to it, in
    microseconds.

    `step_us`, `added_us`: the median step, and the difference of the medians. `mean_us`,
    `added_mean_us`: the same with means, without the slowest 1 % of the steps. `thread_us`: time of
    the recorder's thread per step. `num_ends`: mean number of requests that end per step.
    """

    load: str
    num_running: int
    step_us: float
    added_us: float
    mean_us: float
    added_mean_us: float
    num_ends: float
    thread_us: float = 0.0

    @property
    def share(self) -> float:
        """The listener's cost as a share of the step."""
        return self.added_us / self.step_us

    @property
    def share_with_executor(self) -> float:
        """The listener's cost as a share of a step whose executor takes 5 ms."""
        return self.added_us / (self.step_us + _EXECUTOR_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of an engine. `prompt`, `output`: the smallest and the largest length, tokens.

    `is_closed_loop`: each finished request is replaced by a new one. `num_warm`: steps that are not
    measured.
    """

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    budget: int
    num_warm: int
    is_closed_loop: bool = False

    def config(self, num_running: int) -> SchedulerConfig:
        """Return the scheduler's settings."""
        return SchedulerConfig(max_num_batched_tokens=max(self.budget, num_running))


DECODE = Load(name="decode", prompt=(200, 300), output=(3696, 3696), budget=8192, num_warm=400)
CLOSED_LOOP = Load(
    name="closed loop",
    prompt=(64, 512),
    output=(64, 192),
    budget=2048,
    num_warm=300,
    is_closed_loop=True,
)
WHOLE = Load(name="to the end", prompt=(64, 64), output=(256, 256), budget=16_384, num_warm=8)


class LoadedEngine:
    """An engine, and the requests that are submitted to it."""

    def __init__(self, engine: Engine, num_running: int, load: Load) -> None:
        self._engine = engine
        self._load = load
        self._random = np.random.default_rng(5)
        self._key = 0
        for _ in range(num_running):
            self._arrive()

    def finish(self) -> None:
        """Run all requests to their ends."""
        while self._engine.has_work:
            self._engine.step()

    def step(self) -> tuple[int, int]:
        """Run one step; return its nanoseconds and the number of requests that ended in it."""
        begun_ns = time.perf_counter_ns()
        events = self._engine.step()
        took_ns = time.perf_counter_ns() - begun_ns
        if self._load.is_closed_loop:
            for _ in events.ends:
                self._arrive()
        return took_ns, len(events.ends)

    def _arrive(self) -> None:
        self._key += 1
        num_prompt, max_tokens = (
            int(self._random.integers(low, high + 1))
            for low, high in (self._load.prompt, self._load.output)
        )
        ids = self._random.integers(300, 8000, num_prompt).astype(np.int32)
        spec = RequestSpec(
            key=self._key,
            request_id=str(self._key),
            prompt_ids=ids,
            max_tokens=max_tokens,
            hash_salt=b"benchmark",
            block_hashes=hash_blocks(ids, BLOCK_SIZE, _ROOT),
        )
        self._engine.submit((spec,))


def executor(num_running: int) -> SimulatedExecutor:
    """Return an executor that takes no time and has enough blocks for all requests at full
    length.
    """
    return SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            num_blocks=num_running * (_MAX_SEQ_LEN // BLOCK_SIZE) + 64,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running,
            max_seq_len=_MAX_SEQ_LEN,
        )
    )


@contextlib.contextmanager
def flight(info: ExecutorInfo, config: SchedulerConfig) -> Generator[EngineListeners]:
    """Yield a flight recorder; until the `with` block ends, another process reads its records."""
    fd = create_memory(NUM_KEPT_STEPS, "penstock-benchmark")
    writer = FlightWriter(fd, facts_of("model", 1, info, config))
    command = (sys.executable, __file__, "read", str(fd))
    with subprocess.Popen(
        command, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            expect_ready(reader)
            yield EngineListeners(writer)
        finally:
            assert reader.stdin is not None
            reader.stdin.close()
            reader.wait()
            writer.close()
            os.close(fd)


def read(fd: int) -> None:
    """Read new rows in the same way as the observer, until stdin is closed."""
    import select

    reader = FlightReader(fd)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], _POLL_S)[0]:
        with contextlib.suppress(ValueError):
            reader.new_steps()


def cost_of(listener: EngineListeners, num_running: int, num_steps: int, load: Load) -> Cost:
    """Step two engines alternately, one with the listener and one without; return the listener's
    cost.
    """
    config = load.config(num_running)
    engines = (
        Engine(executor(num_running), config, time.monotonic),
        Engine(executor(num_running), config, time.monotonic, listener=listener),
    )
    loops = [LoadedEngine(engine, num_running, load) for engine in engines]
    for _ in range(load.num_warm):
        for loop in loops:
            loop.step()
    gc.collect()
    gc.freeze()
    times_ns = np.zeros((num_steps, 2), dtype=np.int64)
    num_ends = 0
    for number in range(num_steps):
        # Alternate the order, because the second engine finds the CPU caches warmed by the first.
        for side in (0, 1) if number % 2 else (1, 0):
            times_ns[number, side], ended = loops[side].step()
            num_ends += ended
    gc.unfreeze()
    if not load.is_closed_loop:
        loops[1].finish()
    times_us = times_ns / 1e3
    # The slowest 1 % of the steps, on both sides, is noise of the machine.
    kept = times_us[(times_us <= np.percentile(times_us, 99, axis=0)).all(axis=1)]
    middle, means = np.median(times_us, axis=0), kept.mean(axis=0)
    return Cost(
        load=load.name,
        num_running=num_running,
        step_us=float(middle[0]),
        added_us=float(middle[1] - middle[0]),
        mean_us=float(means[0]),
        added_mean_us=float(means[1] - means[0]),
        num_ends=num_ends / num_steps / 2,
    )


def measure_flight(options: Namespace) -> Outcome:
    """Measure the flight recorder."""
    num_rounds, num_steps = (9, 2400) if options.full else (3, 1200)
    runs: list[Cost] = []
    for num_running, load, _ in itertools.product(
        (32, 256), (DECODE, CLOSED_LOOP), range(num_rounds)
    ):
        with flight(executor(num_running).info, load.config(num_running)) as listener:
            runs.append(cost_of(listener, num_running, num_steps, load))
    found = medians(runs, "load", "num_running")
    columns = ("load", "num_running", "step_us", "added_us", "mean_us", "added_mean_us")
    shares = ("share", "share_with_executor")
    print_rows("The flight recorder, per step of the engine", found, *columns, "num_ends", *shares)
    checks = [
        at_most(f"{one.load} of {one.num_running}: {name}", value, MAX_SHARE, "share")
        for one in found
        if one.num_running == 256
        for name, value in (
            ("added to a step, median", one.share),
            ("added, of a step with 5 ms of executor", one.share_with_executor),
        )
    ]
    return runs, checks


def measure_recording(options: Namespace) -> Outcome:
    """Measure the cost of `--record` on the engine's thread, and on the recorder's thread."""
    runs: list[Cost] = []
    for num_running, _ in itertools.product((32, 256), range(15 if options.full else 5)):
        with tempfile.TemporaryDirectory(prefix="penstock-record-") as folder:
            recorder = Recorder(Path(folder), block_size=BLOCK_SIZE)
            found = cost_of(EngineListeners(recorder), num_running, _NUM_RECORDED, WHOLE)
            begun_s = time.perf_counter()
            recorder.drain()
            thread_us = (time.perf_counter() - begun_s) / WHOLE.output[1] * 1e6
            recorder.close()
        runs.append(replace(found, thread_us=thread_us))
    found_all = medians(runs, "load", "num_running")
    print_rows("Recording, per step of the engine", found_all)
    return runs, [
        check
        for one in found_all
        for check in (
            at_most(f"added to a step of {one.num_running}", one.added_us, GOAL_ENGINE_US, "us"),
            at_most(
                f"recorder's thread for a step of {one.num_running}",
                one.thread_us,
                *(GOAL_THREAD_US, "us"),
            ),
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(int(sys.argv[2]))
    else:
        parts = {"flight": measure_flight, "recording": measure_recording}
        run_parts(arguments(__doc__), parts)
