"""A dashboard that people use shows every request: Arize Phoenix, asked through its API and seen in
a browser.

Slow and large, so deselected unless asked for, with a Phoenix of its own:

    python -m venv /tmp/phoenix && /tmp/phoenix/bin/pip install arize-phoenix
    PENSTOCK_PHOENIX=/tmp/phoenix/bin/phoenix pytest -m slow tests/e2e/test_phoenix.py

PENSTOCK_PHOENIX_PICTURE=FILE.png keeps a picture of a trace.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.chromium import EXECUTABLE, pictured, visited
from support.phoenix import (
    PATIENCE_S,
    VARIABLE,
    Phoenix,
    Trace,
    attribute,
    phoenix,
    traces_of,
)
from support.service import Service, Stream, simulated, started, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROJECT = "penstock"
SERVICE = "penstock.v1.GenerationService"
C = grpc.StatusCode
WHOLE = ("prepare", "queue", "prefill", "decode", "deliver")


@dataclass(frozen=True)
class End:
    """What a client saw, and what the trace of such a request has to say."""

    code: grpc.StatusCode
    reason: str
    children: tuple[str, ...]
    is_error: bool = False


WELL = End(C.OK, "", WHOLE)
INVALID = End(C.INVALID_ARGUMENT, "INVALID_ARGUMENT", ("prepare",))
FULL = End(C.RESOURCE_EXHAUSTED, "QUEUE_FULL", ("prepare", "queue", "deliver"))
LEFT_QUEUE = End(C.CANCELLED, "", ("prepare", "queue"))
LEFT_BATCH = End(C.CANCELLED, "", WHOLE[:4])
LATE = End(C.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", ("prepare", "queue", "deliver"), is_error=True)
KILLED = End(C.UNAVAILABLE, "ENGINE_DOWN", WHOLE, is_error=True)


class Sent:
    """How every request that was sent ended, by its trace id."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.ends: dict[str, End] = {}
        self._channel = channel
        self._stub = pb_grpc.GenerationServiceStub(channel)

    def all_of(self, end: End) -> list[str]:
        return [trace_id for trace_id, found in self.ends.items() if found is end]

    async def note(self, call: Any, end: End, trace_id: str = "") -> None:
        """`call` has to end so; a refused one has its trace in its trailers."""
        assert await call.code() is end.code
        trace_id = trace_id or dict(await call.trailing_metadata())["x-trace-id"]
        assert trace_id not in self.ends
        self.ends[trace_id] = end

    async def run(self, num_tokens: int) -> None:
        one = stream(self._channel, num_tokens)
        await one.outcome()
        await self.note(one._call, WELL, one.trace_id)

    async def once(self, num_tokens: int) -> None:
        request = pb.GenerateOnceRequest(generation=generation())
        request.generation.stopping.max_tokens = num_tokens
        request.generation.stopping.ignore_eos = True
        call = self._stub.GenerateOnce(request)
        response = await call
        await self.note(call, WELL, response.accepted.trace_id)

    async def fail(self, request: pb.GenerateRequest, end: End) -> None:
        call = self._stub.Generate(request)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _message in call:
                pass
        await self.note(call, end)

    async def running(self) -> list[Stream]:
        """As many as the batch holds."""
        streams = [stream(self._channel, 900) for _ in range(2)]
        for one in streams:
            await one.until_running()
        return streams

    async def leave(self, streams: list[Stream], end: End) -> None:
        for one in streams:
            one._call.cancel()
            await self.note(one._call, end, one.trace_id)


def generation() -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.token_prompt.ids.extend([1, 2, 3])
    return request


async def send_all(service: Service, sent: Sent, channel: grpc.aio.Channel) -> None:
    """Requests of every end; two fit into the batch and four into the queue."""
    await sent.run(12)
    for _ in range(2):
        await asyncio.gather(*(sent.run(6) for _ in range(2)), *(sent.once(4) for _ in range(2)))
    for _ in range(3):
        await sent.fail(pb.GenerateRequest(), INVALID)

    running = await sent.running()
    waiting = [stream(channel, 5) for _ in range(4)]
    for one in waiting:
        await one.until_accepted()
    for _ in range(3):
        await sent.fail(generation(), FULL)
    await sent.leave(waiting, LEFT_QUEUE)
    late = generation()
    late.scheduling.total_timeout.FromMilliseconds(200)
    for _ in range(2):
        await sent.fail(late, LATE)
    await sent.leave(running, LEFT_BATCH)

    running = await sent.running()
    os.kill(await service.next_pid("engine"), signal.SIGKILL)
    for one in running:
        await one.outcome()
        await sent.note(one._call, KILLED, one.trace_id)


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Phoenix]:
    command = Path(os.environ.get(VARIABLE, ""))
    if not command.is_file():
        pytest.skip(f"{VARIABLE} names no phoenix command")
    with phoenix(command, tmp_path) as running:
        yield running


async def until_spans(dashboard: Phoenix, num: int) -> list[dict[str, Any]]:
    """Its spans, once it has so many: it takes them in a batch at a time."""
    spans: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(spans) < num:
                spans = await asyncio.to_thread(dashboard.spans, PROJECT)
    except TimeoutError:
        raise AssertionError(f"{len(spans)} spans of {num}") from None
    return spans


async def test_phoenix_shows_every_request(dashboard: Phoenix, tmp_path: Path) -> None:
    arguments = (
        *simulated(),
        *("--fronts", "1", "--max-num-seqs", "2", "--max-num-waiting", "4"),
        *("--foresee-deadlines", "off", "--otlp-endpoint", dashboard.otlp, "--max-replays", "0"),
    )
    environment = {"OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={PROJECT}"}
    async with started(*arguments, environment=environment) as service:
        async with service.channel() as channel:
            sent = Sent(channel)
            await send_all(service, sent, channel)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    num_spans = sum(1 + len(end.children) for end in sent.ends.values())
    spans = await until_spans(dashboard, num_spans)

    assert len(sent.ends) == 25
    traces = traces_of(spans)
    assert set(traces) == set(sent.ends)
    for trace_id, end in sent.ends.items():
        check(traces[trace_id], end)
    failed = {key for key, trace in traces.items() if trace.root["status_code"] == "ERROR"}
    assert failed == {*sent.all_of(LATE), *sent.all_of(KILLED)}
    waits_s = {key: duration_s(traces[key].children[1]) for key in sent.all_of(WELL)}
    waited = max(waits_s, key=waits_s.__getitem__)
    await check_page(dashboard, waited, tmp_path)


def check(trace: Trace, end: End) -> None:
    """It is what Phoenix takes for a call of a model, and says what the client saw."""
    root = trace.root
    assert root["name"].rpartition("/")[0] == SERVICE
    assert root["span_kind"] == "LLM"
    assert attribute(root, "rpc.response.status_code") == end.code.name
    assert (attribute(root, "penstock.error.reason") or "") == end.reason
    assert (root["status_code"] == "ERROR") == end.is_error
    assert root["status_message"] == ""
    assert trace.names == end.children
    assert trace.children[0]["start_time"] == root["start_time"]
    assert trace.children[-1]["end_time"] == root["end_time"]
    for before, after in pairwise(trace.children):
        assert before["end_time"] == after["start_time"], "a gap, or an overlap"
    if end is WELL:
        assert attribute(root, "llm.token_count.prompt") in (3, 4)
        assert attribute(root, "llm.token_count.completion") in (4, 6, 12)


def duration_s(span: dict[str, Any]) -> float:
    begun, ended = (datetime.fromisoformat(span[f"{end}_time"]) for end in ("start", "end"))
    return (ended - begun).total_seconds()


async def check_page(dashboard: Phoenix, trace_id: str, home: Path) -> None:
    """The page of a trace, as a browser shows it, has its tree."""
    if not EXECUTABLE.exists():
        return
    projects = dashboard.ask("projects")["data"]
    (project_id,) = [project["id"] for project in projects if project["name"] == PROJECT]
    url = f"{dashboard.url}/projects/{project_id}/traces/{trace_id}"
    left = await asyncio.to_thread(visited, url, home / "browser", seconds=15)
    for name in ("Generate", *WHOLE):
        assert name in left.text, name
    picture = os.environ.get("PENSTOCK_PHOENIX_PICTURE")
    if picture:
        await asyncio.to_thread(pictured, url, home / "camera", Path(picture), seconds=15)
