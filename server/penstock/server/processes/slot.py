"""A place in the service for one process: whoever dies in it is followed by another.

Owns the life of that place: start, restart with back-off, retirement. Does not know what the
process does, nor the other places.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.server.link.control_frames import FromChild, StopHeard
from penstock.server.observe.logs import IN_BANNER
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.exit_codes import EXIT_CANNOT_START, EXIT_OK, describe_exit
from penstock.server.processes.restarts import MAX_DEATHS, WINDOW_S, RestartPolicy

log = logging.getLogger(__name__)


CleanUp = Callable[[int, bool], Awaitable[None]]


class KeepsDying(Exception):
    """Too many deaths in too short a time; the message is for the operator."""


class Slot:
    """Keeps one process alive by `spawn`. Run `keep_alive` as a task.

    `clean_up` runs to its end after every process, however that ended, and before the next; it is
    told the exit code, and whether that end was ordered. `on_message` gets what a process says once
    it is ready.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[Child]],
        clean_up: CleanUp | None = None,
        on_message: Callable[[FromChild], None] | None = None,
    ) -> None:
        self.name = name
        self.is_ready = asyncio.Event()
        self._spawn = spawn
        self._clean_up = clean_up
        self._on_message = on_message
        self._facts: dict[str, Any] = {}
        self._child: Child | None = None
        self._retired = asyncio.Event()
        self._gone = asyncio.Event()
        self._is_restart = False
        self._has_heard = False
        self._was_killed = False
        self._may_restart = True
        self._was_ready = False
        self._restarts = RestartPolicy()

    @property
    def may_hang(self) -> bool:
        """Whether the process is to come round: it is ready, and was not told to finish."""
        return self.is_ready.is_set() and not (self._retired.is_set() or self._is_restart)

    @property
    def facts(self) -> dict[str, Any]:
        """What the process said of itself when it was last ready."""
        return self._facts

    def retire(self, grace_s: float | None = None, *, is_hand_over: bool = False) -> None:
        """Ask the process to finish (in `grace_s` if given); `keep_alive` returns when it has.

        `is_hand_over`: another slot has what takes its place.
        """
        self._may_restart = False
        self._retired.set()
        if self._child is not None:
            self._child.stop(grace_s, is_hand_over=is_hand_over)

    def tell_engine_lost(self) -> None:
        """Tell the process, a front, that no engine will come any more."""
        if self._child is not None:
            self._child.tell_engine_lost()

    def abort(self) -> None:
        """End the process now, as if it had died: another follows."""
        if self._child is not None:
            self._child.kill()

    async def restart(self, limit_s: float) -> None:
        """Have the process finish, within `limit_s`, and another follow; returns once it is up.

        It is no death. One that is about to be followed by another anyway is left alone.
        """
        child = self._child
        if child is not None and self.is_ready.is_set():
            self._is_restart = True
            child.stop()
            try:
                async with asyncio.timeout(limit_s):
                    await self._gone.wait()
            except TimeoutError:
                log.warning("%s did not end in %g s: killing it", self.name, limit_s)
                child.kill()
                await self._gone.wait()
        await self.is_ready.wait()

    def kill(self) -> None:
        """End the process now, and for good."""
        self._may_restart = False
        self._was_killed = True
        self._retired.set()
        if self._child is not None:
            self._child.kill()

    async def keep_alive(self) -> int:
        """Start the process, and again whenever it dies; the code of the last one.

        A start may take as long as it takes: only `retire` and `kill` cut it short. Raises
        ChildFailed when the very first cannot start, KeepsDying when restarting is in vain.
        """
        while True:
            code = await self._run_one()
            is_last = not self._may_restart  # its end was awaited: how it ended counts
            is_restart, self._is_restart = self._is_restart, False
            await self._clean_up_after(code, was_ordered=is_restart or self._retired.is_set())
            if is_last:
                return code
            if is_restart:
                continue
            delay_s = self._restarts.next_delay_s(time.monotonic())
            if delay_s is None:
                raise KeepsDying(f"{self.name} died {MAX_DEATHS} times in {WINDOW_S:g} s")
            told = describe_exit(code)
            log.warning("%s died (%s), next in %.1f s", self.name, told, delay_s, extra=ALWAYS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._retired.wait(), delay_s)
            if not self._may_restart:
                return EXIT_OK

    async def _clean_up_after(self, code: int, *, was_ordered: bool) -> None:
        if self._clean_up is not None:
            await self._clean_up(code, was_ordered)

    def _hear(self, frame: FromChild) -> None:
        if isinstance(frame, StopHeard):
            self._has_heard = True
        elif self._on_message is not None:
            self._on_message(frame)
        else:
            log.error("%s: nobody wants to hear of %s", self.name, type(frame).__name__)

    async def _run_one(self) -> int:
        try:
            child = await self._spawn()
        except OSError as error:
            if not self._was_ready:
                raise ChildFailed(f"{self.name}: cannot start a process: {error}") from error
            log.warning("%s: cannot start a process: %s", self.name, error, extra=ALWAYS)
            return EXIT_CANNOT_START
        self._child = child
        self._gone.clear()
        self._has_heard = False
        if self._retired.is_set():
            child.kill()
        try:
            facts = await child.started()
        except ChildFailed as failure:
            if not self._was_ready:
                code = await child.ended()
                await self._clean_up_after(code, was_ordered=self._retired.is_set())
                raise
            if not self._retired.is_set():
                log.warning("%s", failure, extra=ALWAYS)
        else:
            extra = ALWAYS if self._was_ready else {**ALWAYS, **IN_BANNER}
            self._was_ready = True
            self._facts = facts
            self.is_ready.set()
            details = "".join(f" {name}={value}" for name, value in facts.items())
            log.info("%s is ready: pid=%d%s", self.name, child.pid, details, extra=extra)
        child.listen(self._hear)
        code = await child.ended()
        was_needed = self.is_ready.is_set() or not self._retired.is_set()
        self.is_ready.clear()
        self._child = None
        self._gone.set()
        if self._retired.is_set() and code < 0 and not (self._has_heard or self._was_killed):
            # It died by itself just before: there is nothing that it did wrong in finishing.
            log.warning("%s was %s before it heard of the end", self.name, describe_exit(code))
            return EXIT_OK
        # One that was told to finish while it still started had nothing to finish.
        return code if was_needed else EXIT_OK
