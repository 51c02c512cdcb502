"""`penstock demo --kill`: kills the engine process during three streams, which continue.

Runs the same three requests with and without a `kill -9`, and compares the outputs.
"""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence

from penstock.client import Client, Tokens
from penstock.server.cli.command import ExitCode
from penstock.server.cli.report import table_lines
from penstock.tools.demo.run import DemoRequest, DemoRun
from penstock.tools.demo.view import PaneView
from penstock.tools.own_service import OwnService, ServiceFailed

_KILL_AFTER_TOKENS = 150
"""Total tokens of all streams after which the engine is killed."""
_DEADLINE_S = 120.0


class _DemoStream:
    """One stream. `longest_gap_s`: the longest time between two consecutive messages with tokens,
    seconds. `on_tokens` is called with the text of each of these messages.
    """

    def __init__(self, request: DemoRequest) -> None:
        self.run = DemoRun(request)
        self.longest_gap_s = 0.0
        self.on_tokens: Callable[[str], None] = _ignore

    async def read(self, client: Client) -> None:
        now = asyncio.get_running_loop().time
        begun_s = now()
        before_s: float | None = None
        request = self.run.request
        async for event in client.generate(
            request.prompt, deadline_s=_DEADLINE_S, **request.options
        ):
            text = self.run.on_event(event, now() - begun_s)
            if isinstance(event, Tokens):
                if before_s is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now() - before_s)
                before_s = now()
                self.on_tokens(text)


async def kill_scene(service: OwnService, requests: Sequence[DemoRequest]) -> int:
    """Run the streams without and with a kill, and compare; return the exit code. Raises
    ServiceFailed if the engine process is not found.
    """
    async with Client(service.address) as client:
        print("three streams without a crash ...", flush=True)
        reference = await _stream_all(client, [_DemoStream(request) for request in requests])
        print("the same three streams, with kill -9 of the engine process ...", flush=True)
        killed = [_DemoStream(request) for request in requests]
        await _stream_and_kill(service, client, killed)
    rows = [
        (
            after.run.request.name,
            str(after.run.num_tokens),
            f"{before.longest_gap_s * 1e3:.0f} ms",
            f"{after.longest_gap_s * 1e3:.0f} ms",
            "yes" if after.run.text == before.run.text else "NO",
        )
        for before, after in zip(reference, killed, strict=True)
    ]
    header = ("STREAM", "TOKENS", "LONGEST GAP BEFORE", "WITH THE KILL", "SAME TEXT")
    print("\n".join(["", *table_lines([header, *rows])]))
    print("\nNo stream failed and no client retried: the next engine continued.", flush=True)
    return ExitCode.OK if all(row[-1] == "yes" for row in rows) else ExitCode.FAILED


async def _stream_all(client: Client, streams: list[_DemoStream]) -> list[_DemoStream]:
    await asyncio.gather(*(stream.read(client) for stream in streams))
    return streams


async def _stream_and_kill(service: OwnService, client: Client, streams: list[_DemoStream]) -> None:
    """Run all streams and kill the engine meanwhile; on a terminal, display their text."""
    show: Callable[[str], None] = functools.partial(print, flush=True)
    view: PaneView | None = None
    if sys.stdout.isatty():
        runs = [stream.run for stream in streams]
        view = PaneView(sys.stdout, runs, headline="the engine runs")
        show = view.set_headline
    has_begun = asyncio.Event()

    def on_tokens(stream: _DemoStream, text: str) -> None:
        if view is not None:
            view.on_text(stream.run, text)
        if sum(each.run.num_tokens for each in streams) >= _KILL_AFTER_TOKENS:
            has_begun.set()

    for stream in streams:
        stream.on_tokens = functools.partial(on_tokens, stream)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_stream_all(client, streams))
            tasks.create_task(_kill(service, streams, has_begun, show))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        if view is not None:
            view.close()


async def _kill(
    service: OwnService,
    streams: Sequence[_DemoStream],
    has_begun: asyncio.Event,
    show: Callable[[str], None],
) -> None:
    await has_begun.wait()
    pid = service.engine_pid()
    if pid is None:
        raise ServiceFailed("the engine process was not found in /proc")
    os.kill(pid, signal.SIGKILL)
    counts = ", ".join(f"{each.run.request.name} {each.run.num_tokens}" for each in streams)
    show(f"kill -9 {pid}: engine killed after {counts} tokens")


def _ignore(text: str) -> None:
    """Discard the text of a stream that is not displayed."""
