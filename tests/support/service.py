"""A real `penstock serve` on a free port, and a client for it.

Every wait has a time limit; only this child process and its children are signalled.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.server.cli.serve import READY_LINE
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.generate_requests import greedy
from support.timeout import TEST_TIMEOUT_S

# In a log line as text or as JSON.
_CHILD_READY = re.compile(
    r'supervised_process(?:: |", "message": ")(engine|front|observer) ?\d* ?is ready: pid=(\d+)'
)
_MAX_LINES = 5000


def simulated(step_s: float = 0.01, **settings: Any) -> list[str]:
    """Return arguments for a simulated executor whose steps take `step_s` of real time, independent
    of the batch. `settings`: other fields of SimulatedConfig.
    """
    cost = {
        "step_s": step_s,
        "prefill_token_s": 0.0,
        "decode_slot_s": 0.0,
        "context_token_s": 0.0,
    }
    config = {"is_real_time": True, "cost": cost, **settings}
    return ["--executor", "simulated", "--simulated-config", json.dumps(config)]


class Service:
    """A `penstock serve` process, created by `launched` or `started`. `pids`: by role, the pids of
    its child processes that have become ready.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self.pids: dict[str, asyncio.Queue[int]] = defaultdict(asyncio.Queue)
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Condition()
        self._readers = [
            asyncio.create_task(self._read_stdout()),
            asyncio.create_task(self._read_stderr()),
        ]

    async def until_ready(self) -> None:
        """Wait for the ready line; raise AssertionError with the log if the process ends
        instead.
        """
        async with asyncio.timeout(TEST_TIMEOUT_S):
            self.address = await self._ready

    async def next_pid(self, role: str) -> int:
        """Return the pid of the next process that becomes ready as "engine", "front" or
        "observer".
        """
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await self.pids[role].get()

    async def next_pids(self, num_fronts: int) -> tuple[int, list[int]]:
        engine = await self.next_pid("engine")
        return engine, [await self.next_pid("front") for _ in range(num_fronts)]

    async def until_logged(self, *texts: str) -> str:
        """Wait for the first line of stderr that contains all of `texts`."""
        return await self._line(self.stderr, lambda line: all(text in line for text in texts))

    async def printed_address(self, name: str) -> str:
        """Wait until the service has printed its "operations" or "metrics" address, and return
        it.
        """
        prefix = f"penstock {name} on "
        line = await self._line(self.stdout, lambda line: line.startswith(prefix))
        return line.removeprefix(prefix).strip()

    async def _line(self, lines: list[str], is_it: Callable[[str], bool]) -> str:
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            while True:
                for line in filter(is_it, lines):
                    return line
                await self._changed.wait()

    async def ended(self) -> int:
        """Wait for the exit of the process and the end of its output; return the exit code."""
        async with asyncio.timeout(TEST_TIMEOUT_S):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    async def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            async with self._changed:
                self.stdout.append(raw.decode())
                self._changed.notify_all()
            ready = READY_LINE.match(raw.decode())
            if ready and not self._ready.done():
                self._ready.set_result(ready.group(1))

    async def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode()
            assert len(self.stderr) < _MAX_LINES, "the log does not end"
            async with self._changed:
                self.stderr.append(line)
                self._changed.notify_all()
            child = _CHILD_READY.search(line)
            if child:
                self.pids[child.group(1)].put_nowait(int(child.group(2)))
        if not self._ready.done():
            self._ready.set_exception(AssertionError("".join(self.stderr)))
            self._ready.exception()  # so that asyncio does not log it as never retrieved


@contextlib.asynccontextmanager
async def launched(
    *arguments: str, environment: dict[str, str] | None = None, through: Sequence[str] = ()
) -> AsyncGenerator[Service]:
    """Start `penstock serve` with these arguments, by default on a free port and without the
    operations and metrics ports.

    `through`: the start of a command line that executes the command appended to it.
    """
    port = [] if "--port" in arguments else ["--port", "0"]
    # Without an observer the service starts sooner; `--metrics-port 0` enables it.
    for option in ("--operations-port", "--metrics-port"):
        port += [] if option in arguments else [option, "off"]
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    process = await asyncio.create_subprocess_exec(
        *(*through, sys.executable, "-m", "penstock.tools", "serve", *port, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**inherited, **(environment or {})},
    )
    service = Service(process)
    try:
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await service.ended()


@contextlib.asynccontextmanager
async def started(*arguments: str, **options: Any) -> AsyncGenerator[Service]:
    """Start the service as `launched` does, and wait until it is ready."""
    async with launched(*arguments, **options) as service:
        await service.until_ready()
        yield service


class Stream:
    """One greedy call of Generate. The constructor's `num_tokens` is the number of output tokens
    requested, and `first_token` the first token id of the prompt. The attributes `num_tokens` and
    `text` are what was read so far.
    """

    def __init__(self, channel: grpc.aio.Channel, num_tokens: int, first_token: int = 5) -> None:
        stub = pb_grpc.GenerationServiceStub(channel)
        self.num_tokens = 0
        self.text = ""
        self.trace_id = ""
        self.has_finished = False
        request = greedy(num_tokens, [first_token, 6, 7, 8])
        self._call = stub.Generate(request, timeout=TEST_TIMEOUT_S)

    async def until_accepted(self) -> None:
        assert await self._read(), f"the stream ended early: {await self._call.code()}"

    async def until_running(self) -> None:
        while self.num_tokens == 0:
            assert await self._read(), f"the stream ended early: {await self._call.code()}"

    async def outcome(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self._read():
                pass
        code: grpc.StatusCode = await self._call.code()
        return code

    async def trailers(self) -> dict[str, str | bytes]:
        return dict(await self._call.trailing_metadata())

    async def _read(self) -> bool:
        message: Any = await self._call.read()
        if message is grpc.aio.EOF:
            return False
        self.num_tokens += message.tokens.num_tokens
        self.text += message.tokens.text
        self.trace_id = message.accepted.trace_id or self.trace_id
        self.has_finished |= message.HasField("finished")
        return True


async def health_of(channel: grpc.aio.Channel) -> int:
    """Wait until the server answers, and return the health of the whole server."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(
        health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=TEST_TIMEOUT_S
    )
    status: int = answer.status
    return status


def health_watch(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=TEST_TIMEOUT_S)


async def until_health(channel: grpc.aio.Channel, wanted: int) -> None:
    watch = health_watch(channel)
    async for answer in watch:
        if answer.status == wanted:
            watch.cancel()
            return
    raise AssertionError("the health watch ended")


async def until_gone(pid: int) -> None:
    """Wait for the exit of a process that need not be a child; return at once if there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended: Any = await asyncio.to_thread(select.select, [descriptor], [], [], TEST_TIMEOUT_S)
        assert ended[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)
