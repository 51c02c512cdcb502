"""Keeps the processes of a service alive, and shuts them down in order.

A process that was replaced is no longer required: it may end without being counted as lost. In a
shutdown the fronts (gRPC server processes) drain, then the engine ends, then the observer,
each within its time limit. While a front has requests for an engine that restarts, the shutdown
waits for that engine.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from penstock.server.processes.exit_codes import EXIT_OK
from penstock.server.processes.supervised_process import SupervisedProcess

logger = logging.getLogger(__name__)
AFTER_DRAIN_S = 1.4
"""Time for fronts to write their last messages after the drain timeout, in seconds."""
_ENGINE_EXIT_S = 0.4
"""Minimum time for the engine to exit after the fronts, in seconds; its executor may request
more."""
_OBSERVER_EXIT_S = 3.8
"""Time for an observer to exit after all other processes, in seconds."""
_OBSERVER_STOP_S = 0.5
"""Time after the drain timeout, in seconds, when an observer receives the command to stop even if
other processes still run. The observer must send its data in time, and processes that still run
then are hung and report nothing more."""
_LAST_EXIT_S = 3.7
"""Time after the drain timeout when the observer is killed, in seconds, so that shutdown ends
within four seconds, also on a busy machine, where exporting the last spans takes longer."""
ObserverTasks = Mapping[SupervisedProcess, "asyncio.Task[int]"]


class ServiceProcesses:
    """The engine and the fronts of a service, each kept alive by a separate asyncio task.

    All methods must be called on one event loop.
    """

    def __init__(self) -> None:
        self._tasks: dict[SupervisedProcess, asyncio.Task[int]] = {}
        self._leaving: set[SupervisedProcess] = set()
        self._changed = asyncio.Event()

    @property
    def all(self) -> tuple[SupervisedProcess, ...]:
        """All processes, including processes that are about to end."""
        return tuple(self._tasks)

    @property
    def tasks(self) -> tuple["asyncio.Task[int]", ...]:
        """The tasks that keep the processes alive, in the order of `all`."""
        return tuple(self._tasks.values())

    def task_of(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """Return the task that keeps the process alive."""
        return self._tasks[process]

    def add(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """Keep a process alive from now on, and return the task that does so."""
        task = asyncio.create_task(process.keep_alive(), name=process.name)
        self._tasks[process] = task
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def expect_exit(self, process: SupervisedProcess) -> None:
        """Allow this process to end from now on, because the service does not require it."""
        self._leaving.add(process)

    def require(self, process: SupervisedProcess) -> None:
        """Require this process from now on. Undoes `expect_exit`."""
        self._leaving.discard(process)
        self._changed.set()

    def remove(self, process: SupervisedProcess) -> None:
        """Remove an ended process from the service."""
        self._leaving.discard(process)
        del self._tasks[process]

    async def all_ready(self) -> None:
        """Wait until all processes have been ready at least once."""
        for process in self.all:
            await process.is_ready.wait()

    async def any_lost(self) -> None:
        """Wait until a required process has ended permanently."""
        while not self.has_lost:
            self._changed.clear()
            await self._changed.wait()

    @property
    def has_lost(self) -> bool:
        """True if a required process has ended permanently."""
        return any(
            task.done() for process, task in self._tasks.items() if process not in self._leaving
        )

    def raise_first(self) -> None:
        """Raise the error that ended a required process, if there is one."""
        for process, task in self._tasks.items():
            if task.done() and process not in self._leaving:
                task.result()

    def has_given_up(self, process: SupervisedProcess) -> bool:
        """Return True if a process is no longer restarted, because it crashed repeatedly or could
        not start."""
        task = self._tasks[process]
        return task.done() and not task.cancelled() and task.exception() is not None

    def failed_to_stop(self, process: SupervisedProcess) -> bool:
        """Return True if a process has not ended, or has ended with an error.

        Errors are ignored if the service does not require the process (see `expect_exit`).
        """
        task = self._tasks[process]
        if process in self._leaving:
            return not task.done()
        return (
            not task.done()
            or task.cancelled()
            or task.exception() is not None
            or task.result() != EXIT_OK
        )


async def drain_in_order(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    observers: ObserverTasks,
    *,
    drain_timeout_s: float,
    engine_exit_s: float,
) -> None:
    """Stop all processes: the fronts within `drain_timeout_s` seconds, then the engine, then the
    observers.

    Returns when all have ended, or after the time limits even if some have not. `observers` has the
    observers and the tasks that keep them alive. `engine_exit_s` is the time that the executor may
    need to release its resources, in seconds.
    """
    fronts = [process for process in processes.all if process is not engine]
    is_lost = processes.has_given_up(engine)
    for front in fronts:
        if is_lost:
            front.send_engine_lost()
        front.retire(drain_timeout_s)
    drain_end_s = time.monotonic() + drain_timeout_s
    await asyncio.gather(
        _end_engine(processes, engine, fronts, drain_end_s + AFTER_DRAIN_S, engine_exit_s),
        _end_observers(observers, processes.tasks, drain_end_s),
    )


async def _end_engine(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    fronts: list[SupervisedProcess],
    fronts_end_s: float,
    engine_exit_s: float,
) -> None:
    """Stop the engine when all fronts have ended, or at the monotonic time `fronts_end_s`. The
    fronts must already be stopping. Then wait until the engine has ended, within its time limit."""
    task, waiting = processes.task_of(engine), {processes.task_of(front) for front in fronts}
    while waiting and (left_s := fronts_end_s - time.monotonic()) > 0:
        watched = waiting if task.done() else {*waiting, task}
        done, _ = await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        if task in done and processes.has_given_up(engine):
            for front in fronts:
                front.send_engine_lost()
    if engine.is_ready.is_set():
        engine.retire()
    else:
        # The engine has no requests. Loading may block in native code for minutes and cannot be
        # stopped.
        engine.kill()
    # An executor may need seconds to shut down. It gets the time that the fronts have not used, or
    # the time that it requests, because nothing is served meanwhile.
    left_s = fronts_end_s + _ENGINE_EXIT_S - time.monotonic()
    await asyncio.wait([task], timeout=max(left_s, engine_exit_s))


async def _end_observers(
    observers: ObserverTasks, tasks: Iterable["asyncio.Task[int]"], drain_end_s: float
) -> None:
    """Stop the observers after all other processes, at the latest `_OBSERVER_STOP_S` seconds after
    `drain_end_s`, the end of the fronts' drain timeout on the monotonic clock."""
    stop_at_s = drain_end_s + _OBSERVER_STOP_S
    await asyncio.wait(tasks, timeout=max(0.0, stop_at_s - time.monotonic()))
    for process, task in observers.items():
        left_s = drain_end_s + _LAST_EXIT_S - time.monotonic()
        limit_s = max(0.0, min(_OBSERVER_EXIT_S, left_s))
        process.retire(limit_s)
        _, late = await asyncio.wait([task], timeout=limit_s)
        if late:
            logger.warning("the %s did not end in time", process.name)
