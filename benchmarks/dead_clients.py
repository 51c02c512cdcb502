"""Measures how soon the queued requests of a dead front (gRPC server process) are removed while the
executor is silent.

While an executor that runs its own steps (such as TensorRT-LLM) returns nothing, nothing makes the
engine's loop run a step. A front process with 600 queued requests disconnects. The time until the
queue is empty is measured, on a real engine loop and socket.

    python benchmarks/dead_clients.py [--full] [--json FILE]
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from argparse import Namespace
from pathlib import Path

import numpy as np

from engine_on_socket import engine_on_socket
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import RequestSpec
from penstock.server.ipc.frames import FrontHello, Submit, encode
from report import Outcome, arguments, at_most, print_rows, run

NUM_QUEUED = 600
_GOAL_S = 0.1
_TIMEOUT_S = 30.0


class SilentExecutor:
    """Accepts requests and never returns a token."""

    def __init__(self) -> None:
        self.ready_fd: int | None
        self.ready_fd, self._write_fd = os.pipe()
        self.info = ExecutorInfo(
            name="silent",
            vocab_size=100,
            block_size=16,
            num_blocks=64,
            max_seq_len=64,
            max_num_seqs=1,
            is_self_paced=True,
        )

    def launch(self, batch: Batch) -> None:
        """See `Executor`."""

    def collect(self) -> StepResult:
        """See `Executor`."""
        nothing = np.zeros(0, dtype=np.int32)
        return StepResult(slots=nothing, tokens=nothing, counts=nothing)

    def close(self) -> None:
        """See `Executor`."""


def front_with_queue(path: Path) -> socket.socket:
    """Connect a socket in the same way as a front, and submit NUM_QUEUED requests; return the
    socket.
    """
    front = socket.socket(socket.AF_UNIX)
    front.connect(str(path))
    front.sendall(encode(FrontHello(front_id=1)))
    front.recv(65536)
    for number in range(1, NUM_QUEUED + 1):
        spec = RequestSpec(
            key=1 << 32 | number,
            request_id=str(number),
            prompt_ids=np.arange(1, 7, dtype=np.int32),
            max_tokens=5,
        )
        front.sendall(encode(Submit(specs=(spec,))))
    return front


def wait_for(engine: Engine, num_waiting: int) -> float:
    """Return the seconds until exactly `num_waiting` requests wait. Raises TimeoutError."""
    began_s = time.monotonic()
    while engine.queue_size[0] != num_waiting:
        if time.monotonic() - began_s > _TIMEOUT_S:
            raise TimeoutError(f"{engine.queue_size[0]} requests wait, expected {num_waiting}")
        time.sleep(0.0005)
    return time.monotonic() - began_s


def measured() -> float:
    """Return the seconds from a front's disconnect until the queue is empty."""
    executor = SilentExecutor()
    engine = Engine(executor, SchedulerConfig(), time.monotonic)
    with engine_on_socket(engine, executor) as path:
        with front_with_queue(path):
            # One request was admitted; the others wait.
            wait_for(engine, NUM_QUEUED - 1)
        return wait_for(engine, 0)


def measure(options: Namespace) -> Outcome:
    """Run several measurements."""
    times_s = [measured() for _ in range(20 if options.full else 5)]
    median_s = statistics.median(times_s)
    row = {"queued": NUM_QUEUED, "min s": min(times_s), "median s": median_s, "max s": max(times_s)}
    print_rows("A dead front", [row])
    name = f"{NUM_QUEUED} queued requests of a dead front gone, median"
    return {"times_s": times_s}, [at_most(name, median_s, _GOAL_S, "s")]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
