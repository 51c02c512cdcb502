"""Keeps one process of the service alive.

Starts the process, restarts it with back-off, detects repeated crashes, and stops it on request.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.server.ipc.control_frames import FromChild, StopReceived
from penstock.server.observe.logs import IN_BANNER
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.exit_codes import EXIT_CANNOT_START, EXIT_OK, describe_exit

MAX_DEATHS = 5
WINDOW_S = 60.0
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class RestartPolicy:
    """Decides when a supervised process is restarted, from the times of its recent deaths."""

    def __init__(self, max_deaths: int = MAX_DEATHS, window_s: float = WINDOW_S) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._deaths_s: deque[float] = deque()

    def record_death(self, now_s: float) -> float | None:
        """Record a death at `now_s`, and return the delay before the next start in seconds; None if
        the process must not be restarted, i.e. after `max_deaths` deaths in `window_s` seconds.

        After the first death in a time window the process restarts immediately. Later delays
        double, up to `_MAX_DELAY_S`.
        """
        deaths = self._deaths_s
        deaths.append(now_s)
        while deaths[0] <= now_s - self._window_s:
            deaths.popleft()
        if len(deaths) >= self._max_deaths:
            return None
        if len(deaths) == 1:
            return 0.0
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** (len(deaths) - 2))


logger = logging.getLogger(__name__)


CleanUp = Callable[[int, bool], Awaitable[None]]


class CrashLoop(Exception):
    """The process died MAX_DEATHS times in WINDOW_S seconds. The message is for the operator."""


class SupervisedProcess:
    """Keeps one process alive. `spawn` starts it, and may change `name` at each start. Run
    `keep_alive` as a task.

    `clean_up` runs after the end of each process, for any reason, and before the next start; its
    arguments are the exit code and True if the process was requested to stop. `on_message` receives
    the messages that a process sends after it is ready.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[Child]],
        clean_up: CleanUp | None = None,
        on_message: Callable[[FromChild], None] | None = None,
    ) -> None:
        self.name = name
        self._slot = name
        self.is_ready = asyncio.Event()
        self._spawn = spawn
        self._clean_up = clean_up
        self._on_message = on_message
        self._facts: dict[str, Any] = {}
        self._child: Child | None = None
        self._retired = asyncio.Event()
        self._has_exited = asyncio.Event()
        self._is_restart = False
        self._has_stop_ack = False
        self._was_killed = False
        self._may_restart = True
        self._was_ready = False
        self._restarts = RestartPolicy()

    @property
    def may_hang(self) -> bool:
        """True if heartbeats are expected: the process is ready and was not requested to stop."""
        return self.is_ready.is_set() and not (self._retired.is_set() or self._is_restart)

    @property
    def facts(self) -> dict[str, Any]:
        """The startup report of the last process that became ready; empty before that."""
        return self._facts

    def retire(self, drain_timeout_s: float | None = None, *, has_successor: bool = False) -> None:
        """Stop the process within `drain_timeout_s` seconds, or within the configured
        time if None. Does not wait.

        `keep_alive` returns when the process has ended. `has_successor` is True if another process
        has taken over.
        """
        self._may_restart = False
        self._retired.set()
        if self._child is not None:
            self._child.stop(drain_timeout_s, has_successor=has_successor)

    def send_engine_lost(self) -> None:
        """Notify the process that no engine will be started again. It must be a front (gRPC server
        process)."""
        if self._child is not None:
            self._child.send_engine_lost()

    def abort(self) -> None:
        """Kill the process. This counts as a crash, after which it is restarted."""
        if self._child is not None:
            self._child.kill()

    async def restart(self, limit_s: float) -> None:
        """Stop the process within `limit_s` seconds and start another one. Returns when the new one
        is ready; does not return if none becomes ready.

        This is not counted as a death. A process that is not ready is not stopped, only waited for.
        """
        child = self._child
        if child is not None and self.is_ready.is_set():
            self._is_restart = True
            child.stop()
            try:
                async with asyncio.timeout(limit_s):
                    await self._has_exited.wait()
            except TimeoutError:
                logger.warning("%s did not end in %g s: killing it", self.name, limit_s)
                child.kill()
                await self._has_exited.wait()
        await self.is_ready.wait()

    def kill(self) -> None:
        """Kill the process. It is not restarted."""
        self._may_restart = False
        self._was_killed = True
        self._retired.set()
        if self._child is not None:
            self._child.kill()

    async def keep_alive(self) -> int:
        """Start the process, and restart it when it dies. Returns its exit code after `retire` or
        `kill`; 0 if no process was running, if it was not ready, or if a signal killed it before it
        received the command to stop.

        Starting has no time limit; only `retire` and `kill` interrupt it. Raises ChildFailed if the
        first start fails, and CrashLoop if the process dies too often.
        """
        while True:
            code = await self._run_one()
            is_last = not self._may_restart  # Its end was requested, so return its code.
            is_restart, self._is_restart = self._is_restart, False
            await self._clean_up_after(code, was_ordered=is_restart or self._retired.is_set())
            if is_last:
                return code
            if is_restart:
                continue
            delay_s = self._restarts.record_death(time.monotonic())
            if delay_s is None:
                raise CrashLoop(f"{self._slot} died {MAX_DEATHS} times in {WINDOW_S:g} s")
            reason = describe_exit(code)
            logger.warning(
                "%s died (%s), restarting in %.1f s", self.name, reason, delay_s, extra=ALWAYS
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._retired.wait(), delay_s)
            if not self._may_restart:
                return EXIT_OK

    async def _clean_up_after(self, code: int, *, was_ordered: bool) -> None:
        if self._clean_up is not None:
            await self._clean_up(code, was_ordered)

    def _on_frame(self, frame: FromChild) -> None:
        if isinstance(frame, StopReceived):
            self._has_stop_ack = True
        elif self._on_message is not None:
            self._on_message(frame)
        else:
            logger.error("%s: unexpected message %s", self.name, type(frame).__name__)

    async def _run_one(self) -> int:
        try:
            child = await self._spawn()
        except OSError as error:
            if not self._was_ready:
                raise ChildFailed(f"{self.name}: cannot start a process: {error}") from error
            logger.warning("%s: cannot start a process: %s", self.name, error, extra=ALWAYS)
            return EXIT_CANNOT_START
        self._child = child
        self._has_exited.clear()
        self._has_stop_ack = False
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
                logger.warning("%s", failure, extra=ALWAYS)
        else:
            extra = ALWAYS if self._was_ready else {**ALWAYS, **IN_BANNER}
            self._was_ready = True
            self._facts = facts
            self.is_ready.set()
            details = "".join(f" {name}={value}" for name, value in facts.items())
            logger.info("%s is ready: pid=%d%s", self.name, child.pid, details, extra=extra)
        child.listen(self._on_frame)
        code = await child.ended()
        was_needed = self.is_ready.is_set() or not self._retired.is_set()
        self.is_ready.clear()
        self._child = None
        self._has_exited.set()
        if self._retired.is_set() and code < 0 and not (self._has_stop_ack or self._was_killed):
            # It crashed just before it received the command to stop, so ignore its exit code.
            logger.warning(
                "%s was %s before it received the command to stop", self.name, describe_exit(code)
            )
            return EXIT_OK
        # A process that received the command to stop while it started had nothing to finish.
        return code if was_needed else EXIT_OK
