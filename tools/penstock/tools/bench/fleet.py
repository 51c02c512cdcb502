"""Starts the load generator's processes, sends them a plan, merges their records, and stops them.

Every wait for a process has a time limit. Processes are spawned, not forked, because gRPC does not
support forking a process that uses it.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self

import grpc

from penstock.client.errors import Failure, PenstockError, error_of
from penstock.tools.bench.pipe import (
    Connect,
    Message,
    MessagePipe,
    Prepare,
    Start,
    Unreachable,
    WorkerDone,
    WorkerProgress,
    WorkerReady,
)
from penstock.tools.bench.plan import Arrivals, LoadPlan
from penstock.tools.bench.recorder import LoadRecorder
from penstock.tools.bench.sender import SenderConfig
from penstock.tools.bench.worker import CONNECT_TIMEOUT_S, run_worker

_START_S = 60.0
_LEAD_S = 0.1
"""Delay of the start of a run after its start message, seconds, so that every process receives the
message in time.
"""
_END_S = 30.0
"""Time limit for the processes to send their records, seconds after the latest end of the run."""
_STOP_S = 5.0
_UPTIME = Path("/proc/uptime")


class FleetFailed(Exception):
    """A process of the load generator died, sent an unexpected message, or missed a time limit; see
    the message.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The result of one run: the merged records of all processes.

    `cpu_shares`: each process's CPU time as a share of one core. `num_idle_cores`: mean number of
    idle cores of this machine during the run, None if unknown (the system has no /proc/uptime).
    `sending_s`: the planned duration. If `max_requests` ended sending early, or a trace is
    replayed: the time from the start of the measurement until the last request was due, plus one
    interval if arrivals are evenly spaced. `duration_s`: from the start of the measurement until
    the last counted request completed, but at least `sending_s`. Both in seconds.
    """

    plan: LoadPlan
    recorder: LoadRecorder
    cpu_shares: tuple[float, ...]
    num_idle_cores: float | None
    sending_s: float
    duration_s: float


class Fleet:
    """The processes of the load generator, as an async context manager: inside the block, every
    process is connected to the service.

    Entering raises PenstockError if the service is unreachable, FleetFailed if a process dies or is
    not ready in time.
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
                    args=(theirs,),
                    name=f"penstock-load-{number}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(MessagePipe(ours))
            for worker in range(self._num_processes):
                self._send(worker, Connect(config=self._config))
            await self._all_ready(_START_S + CONNECT_TIMEOUT_S)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def run(
        self, plan: LoadPlan, on_progress: Callable[[LoadPlan, float, WorkerProgress], None]
    ) -> LoadRun:
        """Execute one run and return its result. A closed loop has a warm-up, which is executed
        first, as a separate run.

        `on_progress` is called whenever a process reports its progress. It receives the plan that
        is executed (of the run or of the warm-up), the seconds since its start, and the sums over
        all processes. Raises FleetFailed.
        """
        if (warm_up := plan.warm_up()) is not None:
            await self._execute(warm_up, on_progress)
        return await self._execute(plan, on_progress)

    async def _execute(
        self, plan: LoadPlan, on_progress: Callable[[LoadPlan, float, WorkerProgress], None]
    ) -> LoadRun:
        for worker in range(self._num_processes):
            self._send(worker, Prepare(plan=plan, worker=worker, num_workers=self._num_processes))
        await self._all_ready(_START_S)
        at_s = time.monotonic() + _LEAD_S
        for worker in range(self._num_processes):
            self._send(worker, Start(at_s=at_s))
        progress = [WorkerProgress() for _ in self._pipes]

        def update(worker: int, latest: WorkerProgress) -> None:
            progress[worker] = latest
            on_progress(plan, time.monotonic() - at_s, _summed(progress))

        limit_s = plan.end_s + plan.drain_s + _LEAD_S + _END_S
        idle = IdleCores()
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._until_done(worker, update))
                    for worker in range(self._num_processes)
                ]
        except TimeoutError:
            raise FleetFailed(
                f"a process of the load generator was not done after {limit_s:g} s"
            ) from None
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return merged_run(plan, [task.result() for task in tasks], idle.mean())

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
                        raise _error_of(answer)
                    if not isinstance(answer, WorkerReady):
                        raise FleetFailed(f"process {worker} of the load sent {answer!r}")
        except TimeoutError:
            raise FleetFailed(
                f"the load generator's processes were not ready after {limit_s:g} s"
            ) from None

    def _send(self, worker: int, message: Message) -> None:
        try:
            self._pipes[worker].send(message)
        except OSError:
            raise self._died(worker) from None

    async def _receive(self, worker: int) -> Message:
        try:
            return await self._pipes[worker].receive()
        except EOFError:
            raise self._died(worker) from None

    def _died(self, worker: int) -> FleetFailed:
        process = self._processes[worker]
        process.join(_STOP_S)
        return FleetFailed(
            f"process {worker} of the load generator exited with exit code {process.exitcode}"
        )

    async def _end(self) -> None:
        """Close the pipes, so that the processes exit. Send SIGTERM to a process that has not
        exited after 5 s, and SIGKILL after 5 s more.
        """
        for pipe in self._pipes:
            pipe.close()
        await asyncio.to_thread(_join_all, self._processes)


class IdleCores:
    """Measures how many cores of the machine are idle, from its creation on."""

    def __init__(self, uptime: Path = _UPTIME) -> None:
        self._uptime = uptime
        self._begun = self._read()

    def mean(self) -> float | None:
        """Return the mean number of idle cores since the creation; None if the system does not
        report it or no time has passed.
        """
        now = self._read()
        if now is None or self._begun is None or now[0] <= self._begun[0]:
            return None
        return (now[1] - self._begun[1]) / (now[0] - self._begun[0])

    def _read(self) -> tuple[float, float] | None:
        """Return the seconds since boot, and the idle seconds since boot, summed over all cores;
        None if they cannot be read.
        """
        try:
            up_s, idle_s = self._uptime.read_text("ascii").split()
        except (OSError, ValueError):
            return None
        return float(up_s), float(idle_s)


def merged_run(
    plan: LoadPlan, parts: list[WorkerDone], num_idle_cores: float | None = None
) -> LoadRun:
    """Merge the records of several processes into one run."""
    recorder = LoadRecorder.from_plan(plan)
    for part in parts:
        recorder.merge(part.recorder)
    sending_s = _sending_s(plan, recorder)
    return LoadRun(
        plan=plan,
        recorder=recorder,
        cpu_shares=tuple(part.cpu_share for part in parts),
        num_idle_cores=num_idle_cores,
        sending_s=sending_s,
        duration_s=max(sending_s, recorder.last_completed_s - plan.start_s),
    )


def _sending_s(plan: LoadPlan, recorder: LoadRecorder) -> float:
    is_cut_short = plan.max_requests is not None and recorder.num_due >= plan.max_requests
    if plan.arrivals is not Arrivals.REPLAY and not is_cut_short:
        return plan.duration_s
    sending_s = max(0.0, recorder.last_due_s - plan.start_s)
    if plan.arrivals is Arrivals.CONSTANT and plan.rate_per_s is not None:
        # The first request is due at the start: N requests are due in N intervals.
        sending_s += 1 / plan.rate_per_s
    return sending_s


def _error_of(answer: Unreachable) -> PenstockError:
    code = grpc.StatusCode[answer.code]
    return error_of(Failure(code=code, message=answer.message, reason=answer.reason))


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
