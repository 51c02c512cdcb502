"""One child process as the supervisor sees it.

Owns its start, its control line and its end. Does not know what the child does or whether it is to
be started again.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from penstock.server.processes.control import engine_lost_order, stop_order
from penstock.server.processes.exit_codes import describe_exit

log = logging.getLogger(__name__)

_STDERR_FD = 2
_REPORTS = ("ready", "failed")
_LAST_WORDS_S = 1.0


class ChildFailed(Exception):
    """The child ended before it was ready; the message says why, for the operator."""


class Child:
    """A running (or ended) child process; made by `spawn`."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(
        cls,
        name: str,
        module: str,
        launch: str,
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
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()  # a process that was started after all ends with its lifeline
            raise
        writer.write(launch.encode() + b"\n")
        return cls(name, process, reader, writer)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def started(self) -> dict[str, Any]:
        """Wait until the child is ready; what it says about itself. Raises ChildFailed."""
        try:
            line = await self._first_line()
        except (asyncio.IncompleteReadError, ConnectionError):  # it ended, maybe within a word
            code = await self._process.wait()
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise ChildFailed(
                f"{self.name}: {describe_exit(code)} before it was ready{hint}"
            ) from None
        except asyncio.LimitOverrunError:
            line = b""
        facts = _facts(line)
        if facts is None:
            self.kill()  # it may go on for long, and nobody knows as what
            raise ChildFailed(f"{self.name}: what it says of itself makes no sense")
        if facts.pop("kind") == "failed":
            await self._process.wait()
            raise ChildFailed(str(facts.get("message", f"{self.name}: cannot start")))
        return facts

    async def _first_line(self) -> bytes:
        """Raises IncompleteReadError when the child ends without one."""
        reading = asyncio.create_task(self._reader.readuntil(b"\n"))
        ending = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            # What it forked may hold the line open after its end; what it said is here by then.
            await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
            if not reading.done():
                raise asyncio.IncompleteReadError(b"", None)
            return reading.result()
        finally:
            reading.cancel()
            ending.cancel()

    async def ended(self) -> int:
        """Wait for the end; the return code, negative for a signal."""
        code = await self._process.wait()
        self.hang_up()
        return code

    def hang_up(self) -> None:
        """Cut the lifeline: the child ends at once, as if this process had died."""
        self._writer.close()

    def stop(self, grace_s: float | None = None, *, is_hand_over: bool = False) -> None:
        """Ask it to finish, within `grace_s` if given; nothing when it has ended.

        `is_hand_over`: another has taken its place already.
        """
        self._writer.write(stop_order(grace_s, is_hand_over=is_hand_over))

    def tell_engine_lost(self) -> None:
        """Say that no engine will come any more; nothing when it has ended."""
        self._writer.write(engine_lost_order())

    async def listen(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Hand on what it says after it is ready, until it ends. What makes no sense is logged."""
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except asyncio.LimitOverrunError:
                log.error("%s: it says too much at once", self.name)  # noqa: TRY400 (one line)
                return
            message = _message(line)
            if message is None:
                log.error("%s: what it says on its control line makes no sense", self.name)
            else:
                on_message(message)

    def kill(self) -> None:
        """End it now; nothing when it has ended."""
        if self._process.returncode is None:
            self._process.kill()


def _facts(line: bytes) -> dict[str, Any] | None:
    """A child's report as `ChildControl` sends them; None when it is not one."""
    message = _message(line)
    return message if message is not None and message["kind"] in _REPORTS else None


def _message(line: bytes) -> dict[str, Any] | None:
    """An object with a kind; None when it is none."""
    try:
        report: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(report, dict):
        return None
    message = cast("dict[str, Any]", report)
    return message if isinstance(message.get("kind"), str) else None
