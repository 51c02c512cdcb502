"""The processes that a service needs, the tasks that keep them alive, and their end in order.

Owns which processes are required (a process that has handed over may end without counting as lost),
and the shutdown: fronts drain, the engine ends, then the observer, each within its time. A
restarting engine is waited for as long as a front has requests for it.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from penstock.server.processes.exit_codes import EXIT_OK
from penstock.server.processes.supervised_process import SupervisedProcess

log = logging.getLogger(__name__)
AFTER_GRACE_S = 1.4
"""Time for fronts to write their last messages after the grace period."""
_ENGINE_EXIT_S = 0.4
"""Minimum time for the engine once the fronts have ended; its executor may request more."""
_OBSERVER_EXIT_S = 1.8
"""Time for an observer once all other processes have ended."""
_OBSERVER_TURN_S = 0.5
"""Time after the grace period when an observer gets the order to finish even though other processes
are left: its data must be sent in time, and a hanging process sends no more.
"""
_LAST_EXIT_S = 1.7
"""Time after the grace period when the observer is killed, so that shutdown ends within two
seconds.
"""
Watchers = Mapping[SupervisedProcess, "asyncio.Task[int]"]


class ServiceProcesses:
    """Processes and their keeper tasks. Lives on one event loop."""

    def __init__(self) -> None:
        self._keepers: dict[SupervisedProcess, asyncio.Task[int]] = {}
        self._leaving: set[SupervisedProcess] = set()
        self._changed = asyncio.Event()

    @property
    def all(self) -> tuple[SupervisedProcess, ...]:
        """All processes, including those that are about to end."""
        return tuple(self._keepers)

    @property
    def keepers(self) -> tuple["asyncio.Task[int]", ...]:
        """The tasks of all processes, in the same order."""
        return tuple(self._keepers.values())

    def keeper_of(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """Return the task of one process."""
        return self._keepers[process]

    def add(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """Keep a process alive from now on; return its task."""
        keeper = asyncio.create_task(process.keep_alive(), name=process.name)
        self._keepers[process] = keeper
        keeper.add_done_callback(lambda _: self._changed.set())
        return keeper

    def expect_exit(self, process: SupervisedProcess) -> None:
        """Let this process end from now on: the service does not require it."""
        self._leaving.add(process)

    def require(self, process: SupervisedProcess) -> None:
        """Require this process from now on; undoes `expect_exit`."""
        self._leaving.discard(process)
        self._changed.set()

    def remove(self, process: SupervisedProcess) -> None:
        """Remove an ended process from the service."""
        self._leaving.discard(process)
        del self._keepers[process]

    async def all_ready(self) -> None:
        """Wait until every process has been ready."""
        for process in self.all:
            await process.is_ready.wait()

    async def any_lost(self) -> None:
        """Wait until a required process has ended for good."""
        while not self.has_lost:
            self._changed.clear()
            await self._changed.wait()

    @property
    def has_lost(self) -> bool:
        """Whether a required process has ended for good."""
        return any(
            keeper.done()
            for process, keeper in self._keepers.items()
            if process not in self._leaving
        )

    def raise_first(self) -> None:
        """Raise the error that ended a process, if there is one."""
        for process, keeper in self._keepers.items():
            if keeper.done() and process not in self._leaving:
                keeper.result()

    def has_given_up(self, process: SupervisedProcess) -> bool:
        """Return whether a process is not restarted because it kept dying."""
        keeper = self._keepers[process]
        return keeper.done() and not keeper.cancelled() and keeper.exception() is not None

    def ended_badly(self, process: SupervisedProcess) -> bool:
        """Return whether a process has not ended, or ended with an error.

        The exit code is ignored for a process that was replaced, or was only meant to replace
        another.
        """
        keeper = self._keepers[process]
        if process in self._leaving:
            return not keeper.done()
        return (
            not keeper.done()
            or keeper.cancelled()
            or keeper.exception() is not None
            or keeper.result() != EXIT_OK
        )


async def drain_in_order(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    watchers: Watchers,
    *,
    grace_s: float,
    engine_exit_s: float,
) -> None:
    """End all processes. `engine_exit_s`: time that the executor may need to release its
    resources.
    """
    fronts = [process for process in processes.all if process is not engine]
    is_lost = processes.has_given_up(engine)
    for front in fronts:
        if is_lost:
            front.send_engine_lost()
        front.retire(grace_s)
    grace_end_s = time.monotonic() + grace_s
    await asyncio.gather(
        _end_engine(processes, engine, fronts, grace_end_s + AFTER_GRACE_S, engine_exit_s),
        _end_watchers(watchers, processes.keepers, grace_end_s),
    )


async def _end_engine(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    fronts: list[SupervisedProcess],
    limit_s: float,
    engine_exit_s: float,
) -> None:
    """End the engine after the fronts, which are already ordered to finish, or after the limit."""
    keeper, waiting = processes.keeper_of(engine), {processes.keeper_of(front) for front in fronts}
    while waiting and (left_s := limit_s - time.monotonic()) > 0:
        watched = waiting if keeper.done() else {*waiting, keeper}
        done, _ = await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        if keeper in done and processes.has_given_up(engine):
            for front in fronts:
                front.send_engine_lost()
    if engine.is_ready.is_set():
        engine.retire()
    else:
        # It has no requests. Loading may block in native code for minutes, where it cannot be
        # stopped.
        engine.kill()
    # An executor may need seconds to shut down. It gets the time that the fronts left, or the time
    # that it asks for: nothing is served meanwhile.
    left_s = limit_s + _ENGINE_EXIT_S - time.monotonic()
    await asyncio.wait([keeper], timeout=max(left_s, engine_exit_s))


async def _end_watchers(
    watchers: Watchers, keepers: Iterable["asyncio.Task[int]"], grace_end_s: float
) -> None:
    """End the observers after all other processes, or when only the time that they need is left."""
    turn_s = grace_end_s + _OBSERVER_TURN_S
    await asyncio.wait(keepers, timeout=max(0.0, turn_s - time.monotonic()))
    for process, watcher in watchers.items():
        left_s = grace_end_s + _LAST_EXIT_S - time.monotonic()
        limit_s = max(0.0, min(_OBSERVER_EXIT_S, left_s))
        process.retire(limit_s)
        _, late = await asyncio.wait([watcher], timeout=limit_s)
        if late:
            log.warning("the %s did not end in time", process.name)
