"""One child process, as the supervisor sees it.

Owns its start, its control connection and its end. Independent of what the child does and of
whether it is restarted.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.server.link.connection import Connection
from penstock.server.link.control_frames import (
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

_Line: TypeAlias = Connection[FromChild]


class ChildFailed(Exception):
    """The child exited before it was ready. The message gives the reason, for the operator."""


class Child:
    """A running or ended child process, created by `spawn`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._first: asyncio.Future[FromChild] = asyncio.get_running_loop().create_future()
        self._early: list[FromChild] = []
        self._on_message: Callable[[FromChild], None] = self._early.append
        self._line: _Line = Connection(
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
        """Start `python -m module <control fd>` and send it its settings. Raises OSError.

        The child's stdout is redirected to our stderr; our stdout carries only the ready line. The
        child gets its own process group, so that Ctrl-C in a terminal reaches the supervisor alone.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fd = theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # do not import from the working directory
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
            await loop.create_unix_connection(lambda: child._line, sock=ours)
        except BaseException:
            ours.close()  # if the process was started nevertheless, it ends with its lifeline
            raise
        child._send(Launch(settings=launch))
        return child

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def started(self) -> dict[str, Any]:
        """Wait until the child is ready; return its startup report. Raises ChildFailed."""
        match await self._first_frame():
            case Ready(facts=facts):
                return dict(facts)
            case StartFailed(message=message):
                await self._process.wait()
                raise ChildFailed(message)
            case None if not self._line.is_broken:
                code = await self._process.wait()
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                raise ChildFailed(f"{self.name}: {describe_exit(code)} before it was ready{hint}")
            case _:
                self.kill()  # its state is unknown
                raise ChildFailed(f"{self.name}: invalid startup report")

    async def _first_frame(self) -> FromChild | None:
        """Return the child's first frame; None if the child or its connection ends without one."""
        closing = asyncio.create_task(self._line.closed.wait())
        ending = asyncio.create_task(self._process.wait())
        answering: set[asyncio.Future[Any]] = {self._first, closing}
        try:
            await asyncio.wait({*answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            # Processes that it forked may hold the line open; frames it sent have arrived by then.
            await asyncio.wait(
                answering, timeout=_FINAL_FRAMES_S, return_when=asyncio.FIRST_COMPLETED
            )
            return self._first.result() if self._first.done() else None
        finally:
            closing.cancel()
            ending.cancel()

    def _on_frame(self, _line: _Line, frame: FromChild) -> None:
        if self._first.done():
            self._on_message(frame)
        else:
            self._first.set_result(frame)

    async def ended(self) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        code = await self._process.wait()
        self.close_lifeline()
        return code

    def close_lifeline(self) -> None:
        """Close the lifeline: the child ends at once, as if this process had died."""
        self._line.abort()

    def stop(self, grace_s: float | None = None, *, is_hand_over: bool = False) -> None:
        """Order the child to finish, within `grace_s` if given. A no-op once it has ended.

        `is_hand_over`: a successor already serves.
        """
        self._send(Stop(grace_s=grace_s, is_hand_over=is_hand_over))

    def send_engine_lost(self) -> None:
        """Notify the child that no engine will start any more. A no-op once it has ended."""
        self._send(EngineLost())

    def listen(self, on_message: Callable[[FromChild], None]) -> None:
        """Pass messages that follow the startup report to `on_message`, including earlier ones."""
        early, self._early = self._early, []
        self._on_message = on_message
        for frame in early:
            on_message(frame)

    def kill(self) -> None:
        """Kill the child. A no-op once it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    def _send(self, frame: ToChild) -> None:
        self._line.write(TO_CHILD.encode(frame))
