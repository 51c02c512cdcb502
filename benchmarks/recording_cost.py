"""The cost of `penstock serve --record` per engine step: on the engine's thread and on the
recorder's thread.

Uses the scheduler with an executor that takes no time, and 32 or 256 running requests; steps with
and without a recorder alternate. The parallel cost is that of the recorder's thread for the same
steps, under the same GIL.

    python benchmarks/recording_cost.py [--full] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.listeners import EngineListeners
from penstock.server.observe.recording.recorder import Recorder
from report import arguments, at_most, conclude, print_table

NUM_PROMPT = 64
NUM_STEPS = 256
GOAL_ENGINE_US = 10.0
GOAL_BESIDE_US = 60.0


def executor(num_running: int) -> SimulatedExecutor:
    """Return an executor with enough blocks for all requests at full length."""
    blocks = num_running * (NUM_PROMPT + NUM_STEPS + 16) // 16 + 64
    return SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            num_blocks=blocks,
            max_num_seqs=num_running,
            max_seq_len=1024,
        )
    )


def steps_s(engine: Engine, num_running: int) -> float:
    """Run `num_running` requests to their end; return the median duration of a decode step,
    seconds.
    """
    prompt = np.zeros(NUM_PROMPT, dtype=np.int32)
    for key in range(1, num_running + 1):
        engine.submit(
            (RequestSpec(key=key, request_id=str(key), prompt_ids=prompt, max_tokens=NUM_STEPS),)
        )
    took_s: list[float] = []
    while engine.has_work:
        begun_s = time.perf_counter()
        engine.step()
        took_s.append(time.perf_counter() - begun_s)
    return statistics.median(took_s)


def measure(num_running: int, rounds: int) -> tuple[float, float, float]:
    """Return microseconds of a step without recording, the recorder's cost on the same thread, and
    its cost in parallel.
    """
    config = SchedulerConfig(max_num_batched_tokens=16_384)
    plain_s: list[float] = []
    recorded_s: list[float] = []
    beside_s: list[float] = []
    for _ in range(rounds):
        plain_s.append(steps_s(Engine(executor(num_running), config, time.monotonic), num_running))
        with tempfile.TemporaryDirectory(prefix="penstock-record-") as folder:
            recorder = Recorder(Path(folder), block_size=16)
            listener = EngineListeners(recorder)
            engine = Engine(executor(num_running), config, time.monotonic, listener)
            recorded_s.append(steps_s(engine, num_running))
            begun_s = time.perf_counter()
            recorder.drain()
            beside_s.append((time.perf_counter() - begun_s) / NUM_STEPS)
            recorder.close()
    added_s = statistics.median(np.subtract(recorded_s, plain_s).tolist())
    return statistics.median(plain_s) * 1e6, added_s * 1e6, statistics.median(beside_s) * 1e6


def main() -> None:
    options = arguments(__doc__).parse_args()
    rounds = 15 if options.full else 5
    rows = [(num, *measure(num, rounds)) for num in (32, 256)]
    columns = ("running", "step us", "added us", "beside us")
    print_table("Recording, per step", columns, rows)
    checks = [
        check
        for num, _, added, beside in rows
        for check in (
            at_most(f"added to a step of {num}", added, GOAL_ENGINE_US, "us"),
            at_most(f"beside a step of {num}", beside, GOAL_BESIDE_US, "us"),
        )
    ]
    results = [dict(zip(columns, row, strict=True)) for row in rows]
    conclude(options, results, checks)


if __name__ == "__main__":
    main()
