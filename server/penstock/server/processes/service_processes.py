"""The processes that a service needs, and the tasks that keep them alive.

Owns which processes are required: one that has handed over leaves without counting as lost.
"""

import asyncio

from penstock.server.processes.exit_codes import EXIT_OK
from penstock.server.processes.supervised_process import SupervisedProcess


class ServiceProcesses:
    """Processes and their keeper tasks. Lives on one event loop."""

    def __init__(self) -> None:
        self._keepers: dict[SupervisedProcess, asyncio.Task[int]] = {}
        self._leaving: set[SupervisedProcess] = set()
        self._changed = asyncio.Event()

    @property
    def all(self) -> tuple[SupervisedProcess, ...]:
        """All processes, those that are about to leave included."""
        return tuple(self._keepers)

    @property
    def keepers(self) -> tuple["asyncio.Task[int]", ...]:
        """Their tasks, in the same order."""
        return tuple(self._keepers.values())

    def keeper_of(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """The task of one process."""
        return self._keepers[process]

    def add(self, process: SupervisedProcess) -> "asyncio.Task[int]":
        """Keep a process alive from now on; returns its task."""
        keeper = asyncio.create_task(process.keep_alive(), name=process.name)
        self._keepers[process] = keeper
        keeper.add_done_callback(lambda _: self._changed.set())
        return keeper

    def expect_exit(self, process: SupervisedProcess) -> None:
        """From now on this process may end: the service does not require it."""
        self._leaving.add(process)

    def require(self, process: SupervisedProcess) -> None:
        """From now on the service requires this process; undoes `expect_exit`."""
        self._leaving.discard(process)
        self._changed.set()

    def remove(self, process: SupervisedProcess) -> None:
        """It has ended and is no longer part of the service."""
        self._leaving.discard(process)
        del self._keepers[process]

    async def all_ready(self) -> None:
        """Return when every process has been ready."""
        for process in self.all:
            await process.is_ready.wait()

    async def any_lost(self) -> None:
        """Return when a required process has ended for good."""
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
        """Whether a process is not restarted because it kept dying."""
        keeper = self._keepers[process]
        return keeper.done() and not keeper.cancelled() and keeper.exception() is not None

    def ended_badly(self, process: SupervisedProcess) -> bool:
        """Whether a process has not ended, or ended with an error.

        For a process that was replaced, or was only meant to replace another, the exit code is
        ignored.
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
