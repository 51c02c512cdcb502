"""Starts a service for the duration of a command, waits until it is ready, and stops it.

The service is a child process, `penstock serve` on a free port. Its start and its stop have time
limits. Signals are sent only to the child.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from penstock.server.cli.serve import READY_LINE
from penstock.server.settings.table import ENVIRONMENT_PREFIX

_STOP_S = 15.0
_KILL_S = 5.0
_NUM_KEPT_LINES = 40
# Engines log whole configurations on one line; if the reader failed on a long line, the service
# would block.
_MAX_LINE_BYTES = 16 << 20


class ServiceFailed(Exception):
    """The service did not start, exited by itself or did not stop cleanly; the message contains the
    cause.
    """


class OwnService:
    """A service in a child process, as an async context manager: inside the block it is ready at
    `address`.

    Raises ServiceFailed if the service does not start, or if the block ends without an error and
    the service's exit code is not 0. `start_s`, `stop_s`: how long the start and the stop took,
    seconds; None until then, and `stop_s` also if the service exited by itself.
    """

    def __init__(
        self,
        serve_args: Sequence[str],
        *,
        start_timeout_s: float,
        stop_timeout_s: float = _STOP_S,
        drain_timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        """`serve_args`: arguments of `penstock serve` in addition to host and port. The operations
        and metrics ports are disabled unless an argument enables them.

        `stop_timeout_s`: the wait after SIGTERM before SIGKILL. `drain_timeout_s`: how long the
        service lets requests finish when it stops, seconds; None: its default. `environment` None:
        the environment of this process without PENSTOCK_ variables. `on_log` is called with every
        line of the service's log.
        """
        self._serve_args = tuple(serve_args)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._drain_args = (
            () if drain_timeout_s is None else ("--drain-timeout-s", f"{drain_timeout_s:g}")
        )
        self._environment = environment
        self._on_log = on_log
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._ready_line: asyncio.Future[str] | None = None
        self._log: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self.ready_line = ""
        self.address = ""
        self.start_s: float | None = None
        self.stop_s: float | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None until the process has ended."""
        return None if self._process is None else self._process.returncode

    async def __aenter__(self) -> Self:
        try:
            await self._start()
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
        exit_code = await self._end()
        if error is None and exit_code != 0:
            raise ServiceFailed(self._explain(f"the service ended with exit code {exit_code}"))

    def engine_pid(self) -> int | None:
        """Return the pid of the current engine process; None if there is none, or if the system is
        not Linux."""
        # Imported here: commands that need only the client import this module without the server.
        from penstock.server.process_table import child_with_argument, is_supported
        from penstock.server.processes.spawn_context import ENGINE_MODULE

        if self._process is None or not is_supported():
            return None
        return child_with_argument(self._process.pid, ENGINE_MODULE)

    async def wait_until_gone(self) -> None:
        """Wait until the process has exited."""
        assert self._process is not None
        await self._process.wait()

    def exit_error(self) -> ServiceFailed:
        """Return an error, to be raised by the caller, for a process that has exited by itself."""
        code = self._process.returncode if self._process is not None else None
        return ServiceFailed(self._explain(f"the service ended by itself with exit code {code}"))

    async def _start(self) -> None:
        started_s = time.monotonic()
        self._ready_line = asyncio.get_running_loop().create_future()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.tools", "serve"),
            *("--host", "127.0.0.1", "--port", "0", *self._drain_args),
            *("--operations-port", "off", "--metrics-port", "off"),
            *self._serve_args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env=without_settings(os.environ) if self._environment is None else self._environment,
            # Ctrl-C must reach only the command, which then stops the service cleanly.
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read_output(process.stdout)),
            asyncio.create_task(self._read_log(process.stderr)),
        ]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.ready_line = await self._ready_line
        except TimeoutError:
            waited = f"the service was not ready after {self._start_timeout_s:g} s"
            raise ServiceFailed(self._explain(waited)) from None
        match = READY_LINE.match(self.ready_line)
        if match is None:
            # The service's output has ended, so it is about to exit. Without this wait, `_end`
            # would send a signal and report that instead of the service's exit code.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)
            raise ServiceFailed(self._explain("the service ended before it was ready"))
        self.address = match.group(1)
        self.start_s = time.monotonic() - started_s

    async def _end(self) -> int | None:
        """Stop the process if it runs: send SIGTERM, and SIGKILL after the time limit. Return its
        exit code; None if no process was started.
        """
        process = self._process
        if process is None:
            return None
        try:
            if process.returncode is None:
                asked_s = time.monotonic()
                # Not process.terminate(), which takes the exit code of an ended process away from
                # asyncio: it would then report 255.
                os.kill(process.pid, signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), self._stop_timeout_s)
                except TimeoutError:
                    os.kill(process.pid, signal.SIGKILL)
                    await asyncio.wait_for(process.wait(), _KILL_S)
                self.stop_s = time.monotonic() - asked_s
        except ProcessLookupError:
            await asyncio.wait_for(process.wait(), _KILL_S)
        finally:
            # The pipes close with the process; do not wait for a grandchild that holds one open.
            _, late = await asyncio.wait(self._readers, timeout=_KILL_S)
            for reader in late:
                reader.cancel()
        return process.returncode

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        """Read the service's output to its end; set `_ready_line` to the ready line when it
        arrives, or to "" if the output ends without it.
        """
        assert self._ready_line is not None
        async for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip()
            if READY_LINE.match(line) and not self._ready_line.done():
                self._ready_line.set_result(line)
        if not self._ready_line.done():
            self._ready_line.set_result("")

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        async for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip()
            self._log.append(line)
            if self._on_log is not None:
                self._on_log(line)

    def _explain(self, what: str) -> str:
        return "\n".join([what, *(f"  | {line}" for line in self._log)])


@contextlib.asynccontextmanager
async def started_together(*services: OwnService) -> AsyncGenerator[None]:
    """Start services concurrently; stop all of them at the end of the block, or if one does not
    start. Raises ServiceFailed.
    """
    async with contextlib.AsyncExitStack() as stack:
        starts = [asyncio.ensure_future(stack.enter_async_context(one)) for one in services]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        yield


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that set Penstock's settings (PENSTOCK_...)."""
    return {
        key: value for key, value in environment.items() if not key.startswith(ENVIRONMENT_PREFIX)
    }
