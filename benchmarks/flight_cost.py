"""The cost of the flight recorder in a scheduler step, while another process reads it.

Two engines with an executor that takes no time, one recorded and one not, alternate step by step,
so that other load on the machine affects both. There are two loads: all requests decode; and a
closed loop, in which each finished request is replaced (prompts of 64 to 512 tokens, outputs of 64
to 192, a budget of 2048 tokens). A step is `Engine.step`: the scheduler and the engine around it.
The reader is the observer's, which reads new rows four times per second.

    python benchmarks/flight_cost.py [--full] [--json FILE]
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.flight.layout import facts_of
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.listeners import EngineListeners
from report import arguments, at_most, cell, conclude, print_table, progress
from services import expect_ready

BLOCK_SIZE = 16
MAX_SHARE = 0.03
NUM_KEPT_STEPS = 4096
_ROOT = chain_root(b"benchmark")
_WARM_STEPS = 300
_MAX_SEQ_LEN = 4096
_POLL_S = 0.25
_FILL_STEPS = 400
_EXECUTOR_US = 5000.0
"""Duration of a short step of a real model, microseconds, to which the recorder's cost is
compared.
"""
_COLUMNS = (
    *("load", "running", "step us", "added us", "mean us", "added us", "share"),
    *("share with 5 ms of executor", "ends a step"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Duration of a step without the recorder, and the recorder's cost, microseconds: medians and
    means.

    `added_us`: the difference of the medians. `num_ends`: mean number of requests that end per
    step.
    """

    load: str
    num_running: int
    step_us: float
    added_us: float
    mean_us: float
    added_mean_us: float
    num_ends: float

    @property
    def share(self) -> float:
        """The recorder's cost as a share of the step."""
        return self.added_us / self.step_us

    @property
    def share_of_all(self) -> float:
        """The recorder's cost as a share of a step whose executor takes 5 ms."""
        return self.added_us / (self.step_us + _EXECUTOR_US)


class Loop:
    """An engine under constant load.

    `replaces`: each finished request is replaced by a new one; otherwise all requests decode to the
    end.
    """

    def __init__(self, engine: Engine, num_running: int, *, replaces: bool) -> None:
        self._engine = engine
        self._replaces = replaces
        self._random = np.random.default_rng(5)
        self._key = 0
        for _ in range(num_running):
            self._arrive()

    def step(self) -> tuple[int, int]:
        """Run one step; return its nanoseconds and the number of requests that ended in it."""
        begun_ns = time.perf_counter_ns()
        events = self._engine.step()
        took_ns = time.perf_counter_ns() - begun_ns
        if self._replaces:
            for _ in events.ends:
                self._arrive()
        return took_ns, len(events.ends)

    def _arrive(self) -> None:
        self._key += 1
        between = self._random.integers
        num_prompt = int(between(64, 513) if self._replaces else between(200, 301))
        ids = between(300, 8000, num_prompt).astype(np.int32)
        max_tokens = int(between(64, 193)) if self._replaces else _MAX_SEQ_LEN - 400
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
def recorded(num_running: int, config: SchedulerConfig) -> Generator[Engine]:
    """Yield an engine with a flight recorder whose records another process reads."""
    fd = create_memory(NUM_KEPT_STEPS, "penstock-benchmark")
    runs = executor(num_running)
    writer = FlightWriter(fd, facts_of("model", 1, runs.info, config))
    command = (sys.executable, __file__, "read", str(fd))
    with subprocess.Popen(
        command, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            expect_ready(reader)
            yield Engine(runs, config, time.monotonic, listener=EngineListeners(writer))
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


def measure(num_running: int, num_steps: int, *, replaces: bool) -> Found:
    """Run both engines, alternating step by step."""
    budget = 2048 if replaces else 8192
    config = SchedulerConfig(max_num_batched_tokens=max(budget, num_running))
    with recorded(num_running, config) as core:
        plain = Loop(
            Engine(executor(num_running), config, time.monotonic), num_running, replaces=replaces
        )
        flight = Loop(core, num_running, replaces=replaces)
        for _ in range(_WARM_STEPS if replaces else _FILL_STEPS):
            plain.step()
            flight.step()
        gc.collect()
        gc.freeze()
        times_ns = np.zeros((num_steps, 2), dtype=np.int64)
        num_ends = 0
        for number in range(num_steps):
            # Alternate the order, because the second engine finds the CPU caches warmed by the
            # first.
            order: tuple[Callable[[], tuple[int, int]], ...] = (plain.step, flight.step)
            for side in (0, 1) if number % 2 else (1, 0):
                times_ns[number, side], ended = order[side]()
                num_ends += ended
        gc.unfreeze()
    times_us = times_ns / 1e3
    # The slowest 1 % of the steps, on both sides, is noise of the machine.
    kept = times_us[(times_us <= np.percentile(times_us, 99, axis=0)).all(axis=1)]
    middle, means = np.median(times_us, axis=0), kept.mean(axis=0)
    return Found(
        load="closed loop" if replaces else "decode",
        num_running=num_running,
        step_us=float(middle[0]),
        added_us=float(middle[1] - middle[0]),
        mean_us=float(means[0]),
        added_mean_us=float(means[1] - means[0]),
        num_ends=num_ends / num_steps / 2,
    )


def _median_of(rounds: list[Found]) -> Found:
    names = ("step_us", "added_us", "mean_us", "added_mean_us", "num_ends")
    told = {name: statistics.median(getattr(each, name) for each in rounds) for name in names}
    return Found(load=rounds[0].load, num_running=rounds[0].num_running, **told)


def main() -> None:
    options = arguments(__doc__).parse_args()
    num_rounds, num_steps = (9, 2400) if options.full else (3, 1200)
    found: list[Found] = []
    for num_running in (32, 256):
        for replaces in (False, True):
            rounds: list[Found] = []
            for number in range(num_rounds):
                rounds.append(measure(num_running, num_steps, replaces=replaces))
                progress(
                    f"{rounds[-1].load}, {num_running} running, round {number + 1}: "
                    f"{cell(rounds[-1].step_us)} + {cell(rounds[-1].added_us)} us"
                )
            found.append(_median_of(rounds))
    rows = [
        (f.load, f.num_running, f.step_us, f.added_us, f.mean_us, f.added_mean_us, f.share,
         f.share_of_all, f.num_ends)
        for f in found
    ]  # fmt: skip
    print_table("The flight recorder, per step of the engine", _COLUMNS, rows)
    checks = [
        at_most(
            f"{each.load} of {each.num_running}: added to a step, median",
            each.share,
            MAX_SHARE,
            "share",
        )
        for each in found
        if each.num_running == 256
    ]
    checks += [
        at_most(
            f"{each.load} of {each.num_running}: added, of a step with 5 ms of executor",
            each.share_of_all,
            MAX_SHARE,
            "share",
        )
        for each in found
        if each.num_running == 256
    ]
    conclude(options, [{**asdict(each), "share": each.share} for each in found], checks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(int(sys.argv[2]))
    else:
        main()
