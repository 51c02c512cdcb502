"""Measures the CPU time per token that delivery takes in the engine process.

Runs the components of the engine process in one thread (scheduler, simulated executor, dispatcher,
connections) in real time, with processes that stand in for fronts (gRPC server processes) and only
read. Delivery is the thread's CPU time outside the engine's step (polling, splitting by front
process, encoding, sending) plus the creation of the step's events. The rest of the step,
scheduling, is reported separately.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np

from engine_on_socket import listening
from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import RequestSpec, SamplingParams
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.ipc.frames import FrontHello, Submit, encode
from usage import print_usage

_SIDE = "delivery_engine.py SOCKET FRONT_ID STREAMS TOKENS     the front that only reads"
_WARM_STEPS = 20
_LIMIT_S = 60.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Microseconds of CPU time per token: `link_us` for frames and sockets, `events_us` for the
    creation of `StepEvents`, `schedule_us` for the rest of the step.
    """

    num_streams: int
    num_steps: int
    num_fronts: int = 1
    link_us: float
    events_us: float
    schedule_us: float

    @property
    def delivery_us(self) -> float:
        """The sum of `link_us` and `events_us`."""
        return self.link_us + self.events_us

    @property
    def step_us(self) -> float:
        """Microseconds of CPU time per step of all streams, including delivery."""
        return (self.link_us + self.events_us + self.schedule_us) * self.num_streams


class _Stopwatch:
    """Sums the CPU time of this thread within the timed calls."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def timing(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            before_ns = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_ns += time.thread_time_ns() - before_ns

        return timed


def measure_engine(
    num_streams: int, step_ms: float, num_steps: int, *, num_fronts: int = 1
) -> EngineCost:
    """Run `num_steps` steps of all streams, or fewer if a minute does not suffice; return the
    costs. The streams are spread over the fronts round robin.
    """
    num_tokens = num_steps + 4 * _WARM_STEPS
    cost = CostModel(
        step_s=step_ms / 1e3, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0
    )
    executor = SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            max_num_seqs=num_streams,
            max_seq_len=num_tokens + 64,
            num_blocks=num_streams * (num_tokens // 16 + 4),
            pipeline_depth=2,
            simulated=SimulatedConfig(cost=cost, is_real_time=True),
        )
    )
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=8192), time.monotonic)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = str(Path(folder) / "engine.sock")
        with listening(engine, executor, path) as connections, contextlib.ExitStack() as fronts:
            _start_fronts(connections, path, fronts, num_fronts, (num_streams, num_tokens))
            return _run(engine, connections, num_streams, num_steps, num_fronts)


def _start_fronts(
    connections: FrontConnections,
    path: str,
    fronts: contextlib.ExitStack,
    num_fronts: int,
    load: tuple[int, int],
) -> None:
    """Connect all fronts; then make each submit its share of the streams."""
    num_streams, num_tokens = load
    children: list[subprocess.Popen[bytes]] = []
    for index in range(num_fronts):
        share = len(range(index, num_streams, num_fronts))
        command = (sys.executable, __file__, path, str(index + 1), str(share), str(num_tokens))
        child = fronts.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        fronts.callback(child.terminate)
        children.append(child)
    give_up_s = time.monotonic() + _LIMIT_S
    while connections.num_fronts < num_fronts:
        connections.poll(0.05)
        if time.monotonic() > give_up_s:
            raise SystemExit("the fronts did not connect")
    for child in children:
        assert child.stdin is not None
        child.stdin.close()


def _run(
    engine: Engine, connections: FrontConnections, num_streams: int, num_steps: int, num_fronts: int
) -> EngineCost:
    whole, step, events = _Stopwatch(), _Stopwatch(), _Stopwatch()
    timed_events = events.timing(engine.events.take)
    give_up_s = time.monotonic() + _LIMIT_S
    num_full_steps = num_tokens = 0

    def iterate() -> None:
        nonlocal num_tokens
        connections.poll(0.0 if engine.has_work else 0.05)
        for front_id, frame in connections.dispatcher.step():
            connections.send(front_id, frame)

    def counted_step() -> StepEvents:
        nonlocal num_full_steps, num_tokens
        updates = real_step()
        num_full_steps += len(updates.keys) == num_streams
        num_tokens += len(updates.keys)
        return updates

    real_step = engine.step
    with (
        patch.object(engine.events, "take", timed_events),
        patch.object(engine, "step", step.timing(counted_step)),
    ):
        timed_iteration = whole.timing(iterate)
        while num_full_steps < _WARM_STEPS:
            iterate()
            if time.monotonic() > give_up_s:
                raise SystemExit("the engine side did not start")
        num_tokens = num_full_steps = 0
        for watch in (whole, step, events):
            watch.spent_ns = 0
        while num_full_steps < num_steps and time.monotonic() < give_up_s:
            timed_iteration()
    return EngineCost(
        num_streams=num_streams,
        num_steps=num_full_steps,
        num_fronts=num_fronts,
        link_us=(whole.spent_ns - step.spent_ns) / 1e3 / num_tokens,
        events_us=events.spent_ns / 1e3 / num_tokens,
        schedule_us=(step.spent_ns - events.spent_ns) / 1e3 / num_tokens,
    )


def _front(path: str, front_id: int, num_streams: int, num_tokens: int) -> None:
    """Wait until stdin is closed, submit requests, then read events like a front whose clients read
    fast enough.
    """
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(encode(FrontHello(front_id=front_id)))
        sys.stdin.read()
        for index in range(num_streams):
            spec = RequestSpec(
                key=(front_id << 32) + index + 1,
                request_id=f"{front_id}-{index}",
                prompt_ids=np.array([5, 6, 7, 8], dtype=np.int32),
                max_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0),
                arrival_s=time.monotonic(),
            )
            link.sendall(encode(Submit(specs=(spec,))))
        while link.recv(1 << 16):
            pass


if __name__ == "__main__":
    print_usage(_SIDE, num_arguments=4)
    _front(sys.argv[1], *map(int, sys.argv[2:5]))
