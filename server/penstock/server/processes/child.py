"""Starts one child process of the supervisor and communicates with it.

Exchanges messages with the child over its control connection, and waits for its end. Other modules
decide whether it is restarted.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.server.ipc.connection import Connection
from penstock.server.ipc.control_frames import (
    FROM_CHILD,
    TO_CHILD,
    EngineLost,
    FromChild,
    Launch,
    Ready,
    StartFailed,
    Stop,
    ToChild,
)
from penstock.server.processes.exit_codes import describe_exit

_STDERR_FD = 2
_FINAL_FRAMES_S = 1.0
_MAX_FRAME_BYTES = 64 * 1024

_Connection: TypeAlias = Connection[FromChild]


class ChildFailed(Exception):
    """The child did not become ready. The message has the reason, for the operator."""


class Child:
    """A running or ended child process, created by `spawn`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._first: asyncio.Future[FromChild] = asyncio.get_running_loop().create_future()
        self._early: list[FromChild] = []
        self._on_message: Callable[[FromChild], None] = self._early.append
        self._connection: _Connection = Connection(
            name, FROM_CHILD.decode, on_frame=self._on_frame, max_frame_bytes=_MAX_FRAME_BYTES
        )

    @classmethod
    async def spawn(
        cls,
        name: str,
        module: str,
        launch: bytes,
        *,
        environment: Mapping[str, str],
        inherited_fds: Sequence[int] = (),
    ) -> "Child":
        """Start `python -m module <control fd>` and send it `launch`, the encoded launch
        parameters. Raises OSError if the process cannot be started.

        `environment` is added to the variables of this process. The child inherits `inherited_fds`.
        Its stdout is redirected to this process's stderr, because the stdout of the service is
        reserved for the output of `penstock serve`. It gets a separate process group, so that
        Ctrl-C in a terminal reaches only the supervisor.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fd = theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # Python must not import modules from the working directory.
                    "-m",
                    module,
                    str(fd),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_STDERR_FD,
                    pass_fds=(fd, *inherited_fds),
                    env={**os.environ, **environment},
                    process_group=0,
                )
            child = cls(name, process)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: child._connection, sock=ours)
        except BaseException:
            # If the process was started nevertheless, it ends because its control connection
            # closes.
            ours.close()
            raise
        child._send(Launch(settings=launch))
        return child

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def started(self) -> dict[str, Any]:
        """Wait until the child is ready and return its startup report. Raises ChildFailed if the
        child reports a failure, ends first, or sends an invalid report."""
        match await self._first_frame():
            case Ready(facts=facts):
                return dict(facts)
            case StartFailed(message=message):
                await self._process.wait()
                raise ChildFailed(message)
            case None if not self._connection.is_broken:
                code = await self._process.wait()
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                raise ChildFailed(f"{self.name}: {describe_exit(code)} before it was ready{hint}")
            case _:
                self.kill()  # Its state is unknown.
                raise ChildFailed(f"{self.name}: invalid startup report")

    async def _first_frame(self) -> FromChild | None:
        """Wait for the first frame from the child and return it; None if the child or its
        connection ends without one."""
        closing = asyncio.create_task(self._connection.closed.wait())
        ending = asyncio.create_task(self._process.wait())
        answering: set[asyncio.Future[Any]] = {self._first, closing}
        try:
            await asyncio.wait({*answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            # Processes that the child forked may keep the connection open. Frames that the child
            # sent have arrived already.
            await asyncio.wait(
                answering, timeout=_FINAL_FRAMES_S, return_when=asyncio.FIRST_COMPLETED
            )
            return self._first.result() if self._first.done() else None
        finally:
            closing.cancel()
            ending.cancel()

    def _on_frame(self, _connection: _Connection, frame: FromChild) -> None:
        if self._first.done():
            self._on_message(frame)
        else:
            self._first.set_result(frame)

    async def ended(self) -> int:
        """Wait until the child has ended, close its control connection, and return the exit code.
        It is negative if a signal killed the child."""
        code = await self._process.wait()
        self.close_control()
        return code

    def close_control(self) -> None:
        """Close the control connection. The child then ends immediately, as if this process had
        died."""
        self._connection.abort()

    def stop(self, drain_timeout_s: float | None = None, *, has_successor: bool = False) -> None:
        """Send the command to stop within `drain_timeout_s` seconds, or within the configured time
        if None. Does nothing after the child has ended.

        `has_successor` is True if a successor is already serving.
        """
        self._send(Stop(drain_timeout_s=drain_timeout_s, has_successor=has_successor))

    def send_engine_lost(self) -> None:
        """Notify the child that no engine will be started again. Does nothing after the child has
        ended."""
        self._send(EngineLost())

    def listen(self, on_message: Callable[[FromChild], None]) -> None:
        """Pass all messages after the startup report to `on_message`.

        Messages that arrived before this call are passed immediately.
        """
        early, self._early = self._early, []
        self._on_message = on_message
        for frame in early:
            on_message(frame)

    def kill(self) -> None:
        """Kill the child. Does nothing after it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    def _send(self, frame: ToChild) -> None:
        self._connection.write(TO_CHILD.encode(frame))
