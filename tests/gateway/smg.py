"""Starts the unmodified smg gateway from PyPI in front of workers that tests start.

Its state is read from its log, and polled over HTTP where the log lacks it. Only the gateway's
process is signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from support.ports import reusable_port
from support.timeout import TEST_TIMEOUT_S

CONTRACT = "smg_grpc_proto"
PACKAGES = ("smg", CONTRACT, "openai")
_MAX_LINES = 20_000
_NUM_TRIES = 3


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


class Gateway:
    """A running gateway process. `gateway` provides it with its workers and its tokenizer ready;
    `launched_gateway` does not wait for them.
    """

    def __init__(self, process: asyncio.subprocess.Process, port: int, metrics_port: int) -> None:
        self.process = process
        self.port = port
        self._metrics_url = f"http://127.0.0.1:{metrics_port}"
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._is_over = False
        self._reader = asyncio.create_task(self._read())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_lines(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    async def until_logged(self, text: str, num: int = 1) -> None:
        """Wait for `num` log lines with `text`. Raises AssertionError with the end of the log if
        the gateway exits.
        """
        async with asyncio.timeout(TEST_TIMEOUT_S), self._changed:
            while self.num_lines(text) < num:
                assert not self._is_over, "".join(self.lines[-20:])
                await self._changed.wait()

    async def until_workers(self, num: int) -> None:
        """Wait for `num` worker registrations since the start, and for the tokenizer."""
        await self.until_logged("Activated 1 of 1 worker(s)", num)
        await self.until_logged("Successfully loaded tokenizer")

    async def add_worker(self, address: str) -> None:
        num = self.num_lines("Activated 1 of 1 worker(s)")
        await self.post("/workers", {"url": f"grpc://{address}"})
        await self.until_logged("Activated 1 of 1 worker(s)", num + 1)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers)
        return await asyncio.to_thread(_answer, request)

    async def get(self, path: str) -> Any:
        return await asyncio.to_thread(_answer, urllib.request.Request(f"{self.url}{path}"))

    async def until_healthy(self) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while not all(one["is_healthy"] for one in (await self.get("/workers"))["workers"]):
                pass

    async def until_metric(self, name: str, least: float, **labels: str) -> None:
        """Poll the gateway's metrics until a sample with this name and these labels is at least
        `least`.
        """
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while True:
                text = await asyncio.to_thread(_text_of, f"{self._metrics_url}/metrics")
                values = [
                    float(line.rpartition(" ")[2])
                    for line in text.splitlines()
                    if line.startswith(f"{name}{{") and all(label in line for label in wanted)
                ]
                if values and max(values) >= least:
                    return

    async def ended(self) -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await self.process.wait()
            await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            assert len(self.lines) < _MAX_LINES, "the log does not end"
            async with self._changed:
                self.lines.append(raw.decode(errors="replace"))
                self._changed.notify_all()
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def gateway(
    *addresses: str, arguments: Sequence[str] = (), policy: str = "round_robin"
) -> AsyncGenerator[Gateway]:
    """Start the gateway in front of the workers at `addresses`, ready to serve."""
    async with launched_gateway(*addresses, arguments=(*arguments, "--policy", policy)) as made:
        await made.until_workers(len(addresses))
        yield made


@contextlib.asynccontextmanager
async def launched_gateway(
    *addresses: str, arguments: Sequence[str] = ()
) -> AsyncGenerator[Gateway]:
    """Start the gateway without waiting for its workers; kill it at the end of the block."""
    made = await _launched(addresses, arguments)
    try:
        yield made
    finally:
        if made.process.returncode is None:
            made.process.kill()
        await made.ended()


@contextlib.asynccontextmanager
async def openai_client(made: Gateway) -> AsyncGenerator[Any]:
    """Provide OpenAI's client without retries; untyped, because it may not be installed."""
    async with openai().AsyncOpenAI(
        base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=TEST_TIMEOUT_S
    ) as client:
        yield client


def openai() -> Any:
    return importlib.import_module("openai")


async def _launched(addresses: Sequence[str], arguments: Sequence[str]) -> Gateway:
    """Start the process. Tries several ports, because it does not accept port 0 and a free port may
    be taken meanwhile.
    """
    for _ in range(_NUM_TRIES):
        port, metrics_port = reusable_port(), reusable_port()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-urls", *(f"grpc://{address}" for address in addresses)),
            *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
            *("--log-level", "info", "--log-json"),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
            env={key: value for key, value in os.environ.items() if key[:5] != "OTEL_"},
        )
        made = Gateway(process, port, metrics_port)
        try:
            await made.until_logged("Workers initialized")
        except AssertionError:
            if not made.num_lines("Address already in use"):
                raise
            continue
        return made
    raise AssertionError("no port was free")


def _text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TEST_TIMEOUT_S) as response:
        return str(response.read(), "utf-8")


def _answer(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=TEST_TIMEOUT_S) as response:
        return json.loads(response.read())
