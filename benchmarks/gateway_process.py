"""The smg gateway in front of services that a benchmark started.

Runs the gateway process and reads from its log which workers have registered. The gateway does not
support port 0, so free ports are chosen before its start. Needs the packages `smg` and
`smg-grpc-proto`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator

from report import RunFailed
from services import free_port

_PATIENCE_S = 60.0
_WORKER = "Activated 1 of 1 worker(s)"
_TOKENIZER = "Successfully loaded tokenizer"


class GatewayProcess:
    """The gateway's process. `port`: its HTTP port."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self._num_workers = 0
        self._has_tokenizer = False
        self._log: deque[str] = deque(maxlen=50)
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def until_workers(self, num: int) -> None:
        """Wait until `num` workers have registered since the start. Raises RunFailed."""
        try:
            async with asyncio.timeout(_PATIENCE_S), self._news:
                await self._news.wait_for(lambda: self._has_tokenizer and self._num_workers >= num)
        except TimeoutError:
            raise RunFailed(
                "the gateway did not take its workers:\n" + "".join(self._log)
            ) from None

    async def add_worker(self, address: str) -> None:
        """Add a worker while the gateway serves."""
        num = self._num_workers
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/workers",
            data=json.dumps({"url": f"grpc://{address}"}).encode(),
            headers={"content-type": "application/json"},
        )
        await asyncio.to_thread(urllib.request.urlopen, request, None, _PATIENCE_S)
        await self.until_workers(num + 1)

    async def ended(self) -> None:
        await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace")
            async with self._news:
                self._log.append(line)
                self._num_workers += _WORKER in line
                self._has_tokenizer |= _TOKENIZER in line
                self._news.notify_all()


@contextlib.asynccontextmanager
async def gateway_process(
    *addresses: str, policy: str, options: tuple[str, ...] = ()
) -> AsyncGenerator[GatewayProcess]:
    """Start the gateway and wait until it serves. Raises RunFailed, also if it is not installed."""
    if importlib.util.find_spec("smg") is None:
        raise RunFailed("the gateway is not installed: pip install smg")
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--worker-urls", *(f"grpc://{address}" for address in addresses)),
        *("--policy", policy, "--health-check-interval-secs", "1", "--log-json"),
        *("--worker-startup-check-interval", "1", "--load-monitor-interval", "1", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
    )
    made = GatewayProcess(process, port)
    try:
        await made.until_workers(len(addresses))
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await made.ended()
