"""Starts the load generator's processes, sends them one plan, merges their records, stops them.

Owns the children and every bound on waiting for them. They are spawned, not forked: gRPC does not
survive a fork.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from penstock.tools.bench.pipe import MessagePipe
from penstock.tools.bench.plan import Arrivals, LoadPlan
from penstock.tools.bench.recorder import Recorder
from penstock.tools.bench.sender import SenderConfig
from penstock.tools.bench.worker import (
    REACH_S,
    Order,
    Ready,
    Start,
    Unreachable,
    WorkerDone,
    WorkerProgress,
    run_worker,
)

_START_S = 60.0
_LEAD_S = 0.1
"""Delay between the start message and the start, so that every process receives it in time."""
_END_S = 30.0
"""Time limit for a process to send its record after the last bound of its plan."""
_STOP_S = 5.0


class FleetFailed(Exception):
    """A process of the load generator died or hung; the message names the process and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The merged record of all processes. `cpu_shares`: of one core, for each process.

    `window_s`: the seconds over which rates are computed.
    """

    plan: LoadPlan
    recorder: Recorder
    cpu_shares: tuple[float, ...]
    window_s: float


class Fleet:
    """`async with Fleet(...) as fleet`: inside the block every process is connected to the service.

    Entering raises PenstockError if the service is unreachable, FleetFailed if a process dies.
    """

    def __init__(self, config: SenderConfig, num_processes: int = 1) -> None:
        self._config = config
        self._num_processes = num_processes
        self._processes: list[SpawnProcess] = []
        self._pipes: list[MessagePipe] = []

    async def __aenter__(self) -> Self:
        try:
            context = multiprocessing.get_context("spawn")
            for number in range(self._num_processes):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_worker,
                    args=(theirs, self._config),
                    name=f"penstock-load-{number}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(MessagePipe(ours))
            await self._all_ready(_START_S + REACH_S)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    async def run(
        self, plan: LoadPlan, on_progress: Callable[[float, WorkerProgress], None]
    ) -> LoadRun:
        """Execute one run. `on_progress` receives seconds since the start and sums over all
        processes.

        Raises FleetFailed.
        """
        for worker in range(self._num_processes):
            self._send(worker, Order(plan=plan, worker=worker, num_workers=self._num_processes))
        await self._all_ready(_START_S)
        at_s = time.monotonic() + _LEAD_S
        for worker in range(self._num_processes):
            self._send(worker, Start(at_s=at_s))
        progress = [WorkerProgress() for _ in self._pipes]

        def update(worker: int, latest: WorkerProgress) -> None:
            progress[worker] = latest
            on_progress(time.monotonic() - at_s, _summed(progress))

        limit_s = plan.end_s + plan.drain_s + _LEAD_S + _END_S
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._until_done(worker, update))
                    for worker in range(self._num_processes)
                ]
        except TimeoutError:
            raise FleetFailed(f"a process of the load was not done after {limit_s:g} s") from None
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return merged_run(plan, [task.result() for task in tasks])

    async def _until_done(
        self, worker: int, on_progress: Callable[[int, WorkerProgress], None]
    ) -> WorkerDone:
        while True:
            match await self._receive(worker):
                case WorkerProgress() as latest:
                    on_progress(worker, latest)
                case WorkerDone() as done:
                    return done
                case other:
                    raise FleetFailed(f"process {worker} of the load sent {other!r}")

    async def _all_ready(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                for worker in range(self._num_processes):
                    answer = await self._receive(worker)
                    if isinstance(answer, Unreachable):
                        raise answer.error
                    if not isinstance(answer, Ready):
                        raise FleetFailed(f"process {worker} of the load sent {answer!r}")
        except TimeoutError:
            raise FleetFailed(f"the load's processes were not ready after {limit_s:g} s") from None

    def _send(self, worker: int, message: object) -> None:
        try:
            self._pipes[worker].send(message)
        except OSError:
            raise self._died(worker) from None

    async def _receive(self, worker: int) -> Any:
        try:
            return await self._pipes[worker].receive()
        except EOFError:
            raise self._died(worker) from None

    def _died(self, worker: int) -> FleetFailed:
        process = self._processes[worker]
        process.join(_STOP_S)
        return FleetFailed(
            f"process {worker} of the load ended by itself with exit code {process.exitcode}"
        )

    async def _end(self) -> None:
        """Close the pipes, which ends the processes; kill those that remain."""
        for pipe in self._pipes:
            pipe.close()
        await asyncio.to_thread(_join_all, self._processes)


def merged_run(plan: LoadPlan, parts: list[WorkerDone]) -> LoadRun:
    """Merge the records of several processes into one run."""
    recorder = Recorder(plan)
    for part in parts:
        recorder.merge(part.recorder)
    # A run that reached its number of requests lasted until its last one was sent.
    if plan.is_open_loop:
        is_full = not _has_run_out(plan, recorder)
    else:
        is_full = any(part.was_sending_at_end for part in parts)
    end_s = plan.end_s if is_full else min(plan.end_s, recorder.last_end_s)
    return LoadRun(
        plan=plan,
        recorder=recorder,
        cpu_shares=tuple(part.cpu_share for part in parts),
        window_s=max(0.0, end_s - plan.warm_up_s),
    )


def _has_run_out(plan: LoadPlan, recorder: Recorder) -> bool:
    """Return whether the schedule of an open loop ended before its time limit."""
    if plan.max_requests is not None and recorder.num_due >= plan.max_requests:
        return True
    return plan.arrivals is Arrivals.REPLAY and plan.rows[-1].arrival_s < plan.end_s


def _summed(parts: list[WorkerProgress]) -> WorkerProgress:
    return WorkerProgress(
        num_sent=sum(part.num_sent for part in parts),
        num_ended=sum(part.num_ended for part in parts),
        num_failed=sum(part.num_failed for part in parts),
    )


def _join_all(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.join(_STOP_S)
        if process.is_alive():
            process.terminate()
            process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join(_STOP_S)
