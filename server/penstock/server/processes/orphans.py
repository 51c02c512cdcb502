"""Terminates processes that a dead child process of the supervisor has left running.

An engine may start processes that hold accelerator memory. If these processes outlive the engine,
the next engine finds no free memory. This module makes the supervisor the parent of such orphans,
recognises them and terminates them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable

from penstock.server import process_table
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.process_table import ProcessEntry
from penstock.server.processes.child import Child

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0
"""Time from SIGTERM to SIGKILL in seconds, for all orphans together.

Processes that the engine starts ignore SIGTERM, like the engine does. In this time they can detect
that the engine has ended, and release resources that they shared with it.
"""
LIMIT_S = 5.0
"""After this time, in seconds, the service continues even if some orphans have not ended."""
_POLL_INTERVAL_S = 0.1
_NUM_ROUNDS = 10
_MARK = "PENSTOCK_ENGINE_MARK"
_KILL_MARK = "PENSTOCK_KNOWN_ENGINE_MARK"


class Orphans:
    """Adopts and terminates the orphaned descendants of one supervisor. Has an effect only on
    Linux."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._is_adopting = False
        self._are_all_ours = False
        self._own: set[tuple[int, int]] = set()
        self._starting = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def mark(self) -> dict[str, str]:
        """The environment variable that marks a child process and its descendants."""
        return {_MARK: self._mark}

    @property
    def mark_for_guard(self) -> dict[str, str]:
        """The environment variable from which `end_marked` reads the mark, for a child that calls
        `end_marked` after this process has ended."""
        return {_KILL_MARK: self._mark}

    def adopt(self) -> None:
        """Become the parent of all descendants that become orphans, and reap them when they end.

        Call this once, on the event loop.
        """
        if not process_table.is_supported():
            return
        here = os.getpid()
        earlier_children = process_table.children_of(here)
        # The first process of a container becomes the parent of all orphans in it, and a process
        # that a shell script became by `exec` has earlier children. In both cases only marked
        # processes are terminated.
        self._are_all_ours = here != 1 and not earlier_children
        self._own.update(map(_key, earlier_children))
        self._is_adopting = process_table.become_subreaper()
        if not self._is_adopting:
            logger.warning("no subreaper: processes that a dead engine leaves behind are not ended")
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._on_child_ended)

    async def start(self, spawn: Callable[[], Awaitable[Child]]) -> Child:
        """Start a child with `spawn` and return it. Raises the errors of `spawn`.

        The child is registered, so that it is never treated as an orphan.
        """
        # Between the fork and the return of its process id, the child would look like an orphan.
        async with self._starting:
            child = await spawn()
            entry = process_table.entry_of(child.pid) if self._is_adopting else None
            if entry is not None:
                self._own.add(_key(entry))
            return child

    async def end_all(self, left_by: str) -> None:
        """Terminate all orphans and their orphaned children. Returns after LIMIT_S at the latest.
        `left_by` names, for the log, the process that left them running.

        Call this only while no process runs whose descendants must survive, because they may have
        become orphans too (daemons).
        """
        if not self._is_adopting:
            return
        began_s = time.monotonic()
        details: set[tuple[tuple[int, int], signal.Signals]] = set()
        while True:
            self._changed.clear()
            async with self._starting:
                left = [entry for entry in self._adopted() if self._is_ours(entry)]
            if not left:
                return
            passed_s = time.monotonic() - began_s
            if passed_s >= LIMIT_S:
                logger.error(
                    "processes started by %s are still running after SIGKILL: %s",
                    left_by,
                    _listed(left),
                )
                return
            number = signal.SIGTERM if passed_s < STOP_TIMEOUT_S else signal.SIGKILL
            for entry in left:
                if (_key(entry), number) not in details:
                    details.add((_key(entry), number))
                    _signal(entry, number, left_by)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_INTERVAL_S)

    def _adopted(self) -> list[ProcessEntry]:
        """Return the adopted processes that are alive, and reap those that have ended."""
        children = process_table.children_of(os.getpid())
        self._own.intersection_update(map(_key, children))
        return [
            entry
            for entry in children
            if _key(entry) not in self._own
            and not (entry.has_ended and process_table.reap(entry.pid))
        ]

    def _is_ours(self, entry: ProcessEntry) -> bool:
        return self._are_all_ours or process_table.was_started_with(
            entry.pid, f"{_MARK}={self._mark}"
        )

    def _on_child_ended(self) -> None:
        self._changed.set()
        if not self._starting.locked():
            self._adopted()


def end_marked() -> None:
    """Kill all processes with the mark that this process received in `mark_for_guard`. Takes about
    a second at most.

    Call this when the supervisor has died, so that its orphans have no parent. Blocks; needs no
    event loop.
    """
    mark = os.environ.get(_KILL_MARK)
    if mark is None or not process_table.is_supported():
        return
    for _ in range(_NUM_ROUNDS):
        found = [
            entry
            for entry in process_table.all_processes()
            if not entry.has_ended and process_table.was_started_with(entry.pid, f"{_MARK}={mark}")
        ]
        if not found:
            return
        for entry in found:
            _signal(entry, signal.SIGKILL, "the service")
        # Processes that they were about to start are found in the next round.
        time.sleep(_POLL_INTERVAL_S)


def _signal(entry: ProcessEntry, number: signal.Signals, left_by: str) -> None:
    try:
        is_sent = process_table.send_signal(entry, number)
    except PermissionError:
        logger.exception(
            "not permitted to end a process left behind by %s: %s", left_by, _listed([entry])
        )
        return
    if is_sent:
        details = (number.name, left_by, _listed([entry]))
        logger.warning("%s sent to a process left behind by %s: %s", *details, extra=ALWAYS)


def _listed(entries: list[ProcessEntry]) -> str:
    return ", ".join(f"pid={entry.pid} name={entry.name}" for entry in entries)


def _key(entry: ProcessEntry) -> tuple[int, int]:
    return entry.pid, entry.started_ticks
