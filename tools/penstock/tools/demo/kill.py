"""`penstock demo --kill`: the engine process is killed while three texts stream, and they continue.

Owns the scene: the same three requests with and without a `kill -9` in between, and the comparison.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from penstock.client import Client, Tokens
from penstock.server.cli.exit_codes import ExitCode
from penstock.server.cli.models import table_lines
from penstock.server.cli.report import printable
from penstock.tools.demo.run import DemoRequest
from penstock.tools.own_service import OwnService, ServiceFailed

_KILL_AFTER_TOKENS = 150
"""Of all streams together."""
_DEADLINE_S = 120.0


class _Stream:
    """One request's text, and its longest gap between two messages, seconds."""

    def __init__(self, request: DemoRequest) -> None:
        self.request = request
        self.text = ""
        self.num_tokens = 0
        self.longest_gap_s = 0.0
        self.on_tokens: Callable[[], None] = lambda: None

    async def read(self, client: Client) -> None:
        now = asyncio.get_running_loop().time
        before_s: float | None = None
        request = self.request
        async for event in client.generate(
            request.prompt, deadline_s=_DEADLINE_S, **request.options
        ):
            if isinstance(event, Tokens):
                self.text += event.text
                self.num_tokens += event.num_tokens
                if before_s is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now() - before_s)
                before_s = now()
                self.on_tokens()


async def kill_scene(service: OwnService, requests: Sequence[DemoRequest]) -> int:
    """Play it on a running service; the exit code. Raises ServiceFailed when it ends by itself."""
    async with Client(service.address) as client:
        print("three streams, undisturbed ...", flush=True)
        undisturbed = await _stream_all(client, [_Stream(request) for request in requests])
        print("the same three again, and kill -9 of the engine process in between ...", flush=True)
        killed = [_Stream(request) for request in requests]
        has_begun = asyncio.Event()
        for stream in killed:
            stream.on_tokens = lambda: _set_when_begun(killed, has_begun)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_stream_all(client, killed))
            tasks.create_task(_kill(service, killed, has_begun))
    rows = [
        (
            after.request.name,
            str(after.num_tokens),
            f"{before.longest_gap_s * 1e3:.0f} ms",
            f"{after.longest_gap_s * 1e3:.0f} ms",
            "yes" if after.text == before.text else "NO",
        )
        for before, after in zip(undisturbed, killed, strict=True)
    ]
    header = ("STREAM", "TOKENS", "LONGEST GAP BEFORE", "WITH THE KILL", "SAME TEXT")
    print("\n".join(["", *table_lines([header, *rows])]))
    last = [line[:72] for line in printable(killed[0].text).strip().splitlines()[-3:]]
    print("\n".join(["", f"the end of {killed[0].request.name}:", *(f"  {line}" for line in last)]))
    print("\nNo stream failed and no client called again: the next engine computed on.", flush=True)
    return ExitCode.OK if all(row[-1] == "yes" for row in rows) else ExitCode.FAILED


async def _stream_all(client: Client, streams: list[_Stream]) -> list[_Stream]:
    await asyncio.gather(*(stream.read(client) for stream in streams))
    return streams


def _set_when_begun(streams: Sequence[_Stream], has_begun: asyncio.Event) -> None:
    if sum(stream.num_tokens for stream in streams) >= _KILL_AFTER_TOKENS:
        has_begun.set()


async def _kill(service: OwnService, streams: Sequence[_Stream], has_begun: asyncio.Event) -> None:
    await has_begun.wait()
    pid = service.engine_pid()
    if pid is None:
        raise ServiceFailed("the engine process was not found in /proc")
    os.kill(pid, signal.SIGKILL)
    counts = ", ".join(f"{stream.request.name} {stream.num_tokens}" for stream in streams)
    print(f"kill -9 {pid}: the engine is dead, after {counts} tokens", flush=True)
