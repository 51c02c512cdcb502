"""Commands as their own processes, and a terminal for them to run on."""

import asyncio
import contextlib
import os
import pty
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import IO

from support.scripted_server import ScriptedServer

PROGRAM = (sys.executable, "-m", "penstock.tools")
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


def environment(address: str) -> dict[str, str]:
    return {
        **os.environ,
        "PENSTOCK_ADDRESS": address,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONUTF8": "1",
    }


@contextlib.asynccontextmanager
async def started(
    server: ScriptedServer,
    *args: str,
    stdout: IO[bytes] | int = asyncio.subprocess.PIPE,
    stderr: IO[bytes] | int = asyncio.subprocess.PIPE,
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """A command that runs; it is ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=environment(server.address),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def penstock(server: ScriptedServer, *args: str, stdin: str = "") -> Result:
    async with started(server, *args) as process:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), LIMIT_S)
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


class Terminal:
    """The other end of a pseudo-terminal that a command runs on."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self.shown = b""

    async def wait_for(self, text: bytes) -> None:
        """Read until the text was shown. A thread that reads could not be stopped in time."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT_S):
            while text not in self.shown:
                readable = asyncio.Event()
                loop.add_reader(self._master, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._master)
                self.shown += os.read(self._master, 4096)
        self.shown = self.shown[self.shown.index(text) + len(text) :]

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)
