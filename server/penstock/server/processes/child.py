"""One child process as the supervisor sees it.

Owns its start, its control line and its end. Does not know what the child does or whether it is to
be started again.
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

_STDERR_FD = 2
_LAST_WORDS_S = 1.0
_MAX_FRAME_BYTES = 64 * 1024

_Line: TypeAlias = Connection[FromChild]


class ChildFailed(Exception):
    """The child ended before it was ready; the message says why, for the operator."""


class Child:
    """A running (or ended) child process; made by `spawn`."""

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

        Its stdout goes to our stderr: our own stdout is for whoever waits for the service. It gets
        a process group of its own, so that Ctrl-C in a terminal reaches the supervisor alone.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fd = theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the working directory is no place to import from
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
            ours.close()  # a process that was started after all ends with its lifeline
            raise
        child._tell(Launch(settings=launch))
        return child

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def started(self) -> dict[str, Any]:
        """Wait until the child is ready; what it says about itself. Raises ChildFailed."""
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
                self.kill()  # it may go on for long, and nobody knows as what
                raise ChildFailed(f"{self.name}: what it says of itself makes no sense")

    async def _first_frame(self) -> FromChild | None:
        """None when the child or its line ends without one."""
        closing = asyncio.create_task(self._line.closed.wait())
        ending = asyncio.create_task(self._process.wait())
        speaking: set[asyncio.Future[Any]] = {self._first, closing}
        try:
            await asyncio.wait({*speaking, ending}, return_when=asyncio.FIRST_COMPLETED)
            # What it forked may hold the line open after its end; what it said is here by then.
            await asyncio.wait(speaking, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
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
        """Wait for the end; the return code, negative for a signal."""
        code = await self._process.wait()
        self.hang_up()
        return code

    def hang_up(self) -> None:
        """Cut the lifeline: the child ends at once, as if this process had died."""
        self._line.abort()

    def stop(self, grace_s: float | None = None, *, is_hand_over: bool = False) -> None:
        """Ask it to finish, within `grace_s` if given; nothing when it has ended.

        `is_hand_over`: another has taken its place already.
        """
        self._tell(Stop(grace_s=grace_s, is_hand_over=is_hand_over))

    def tell_engine_lost(self) -> None:
        """Say that no engine will come any more; nothing when it has ended."""
        self._tell(EngineLost())

    def listen(self, on_message: Callable[[FromChild], None]) -> None:
        """Hand on what it says after it is ready, also what it has said already."""
        early, self._early = self._early, []
        self._on_message = on_message
        for frame in early:
            on_message(frame)

    def kill(self) -> None:
        """End it now; nothing when it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    def _tell(self, frame: ToChild) -> None:
        self._line.write(TO_CHILD.encode(frame))
