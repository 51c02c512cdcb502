"""Runs commands in this process or in child processes, also on a pseudo-terminal."""

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import psutil
import pytest

from penstock.tools.command_line import main
from support.scripted_server import ScriptedServer
from support.timeout import TEST_TIMEOUT_S

PROGRAM = (sys.executable, "-m", "penstock.tools")


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment and import path, with only the given `PENSTOCK_*`
    variables.
    """
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    return {**inherited, **path, **variables}


@contextlib.asynccontextmanager
async def running(
    *args: object, variables: Mapping[str, str] | None = None, **streams: IO[bytes] | int
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run a command during the block; kill it and its descendants at the end if it still runs.
    `streams`: its standard streams; by default stdin is empty, and the others are pipes.
    """
    pipe = asyncio.subprocess.PIPE
    given: Any = {"stdin": asyncio.subprocess.DEVNULL, "stdout": pipe, "stderr": pipe} | streams
    env = environment(**(variables or {}))
    process = await asyncio.create_subprocess_exec(*PROGRAM, *map(str, args), env=env, **given)
    try:
        yield process
    finally:
        if process.returncode is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            await process.communicate()


async def ended(
    process: asyncio.subprocess.Process, stdin: str = "", limit_s: float = TEST_TIMEOUT_S
) -> Result:
    out, err = await asyncio.wait_for(process.communicate(stdin.encode() or None), limit_s)
    assert process.returncode is not None
    return Result(process.returncode, (out or b"").decode(), (err or b"").decode())


def called(capsys: pytest.CaptureFixture[str], *args: object) -> Result:
    """Run a command in this process; return its exit code and output."""
    code = main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return Result(code, printed.out, printed.err)


def finished(*args: object, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command in a child process to its end; `data`: its standard input."""
    return subprocess.run(
        [*PROGRAM, *map(str, args)],
        input=data,
        capture_output=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )


async def run(*args: object, **variables: str) -> Result:
    async with running(*args, variables=variables) as process:
        return await ended(process)


def started(
    server: ScriptedServer, *args: str, **streams: IO[bytes] | int
) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Start a command that calls `server`; its stdin is a pipe unless `streams` sets another."""
    given: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, **streams}
    return running(*args, **given, variables={"PENSTOCK_ADDRESS": server.address})


async def penstock(server: ScriptedServer, *args: str, stdin: str = "") -> Result:
    async with started(server, *args) as process:
        return await ended(process, stdin)


class Terminal:
    """A pseudo-terminal. The command uses the end `slave`; the test uses the methods. `shown`:
    output of the command that was read and not yet removed by `wait_for`.
    """

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self.shown = b""

    async def wait_for(self, text: bytes) -> None:
        """Read until `text` was displayed; remove `text` and everything before it from `shown`.

        Reads on the event loop, because a thread that reads could not be stopped.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TEST_TIMEOUT_S):
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
