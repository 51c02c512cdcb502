"""The operations server over scripted data, and reports of fronts, engines and recorders."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.scheduler.live_view import LiveView
from penstock.scheduler.state import RequestState
from penstock.server.observe.flight.layout import STEP, EventKind, FlightFacts
from penstock.server.observe.flight.memory import (
    EVENT_RING,
    REQUEST_RING,
    STEP_RING,
    RingMemory,
    create_memory,
)
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.frames import FrontView, Heartbeat, OutcomeCount
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import (
    CacheSnapshot,
    FrontSnapshot,
    ModelSnapshot,
    OperationsError,
    Percentiles,
    PhaseChange,
    RequestView,
    Snapshot,
)
from penstock.server.rpc.operations_service import OperationsServer
from penstock.v1 import operations_service_pb2_grpc as pb_grpc
from support.fronts import PATIENCE_S, RichError, rich_error
from support.metric_samples import beat as metric_beat

NOW_UNIX_S = 1_790_000_000.0

MODEL = ModelSnapshot(
    model="tiny",
    is_up=True,
    epoch=2,
    num_pending=3,
    num_processing=5,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    cache=CacheSnapshot(
        block_size_tokens=16,
        num_total_blocks=100,
        num_used_blocks=40,
        num_cached_blocks=35,
        num_free_blocks=25,
    ),
    num_accepted=20,
    num_refused=2,
    num_completed=11,
    num_cancelled=1,
    num_failed=1,
    num_preemptions=4,
    num_steps=1000,
    num_prompt_tokens=5000,
    num_cached_prompt_tokens=1250,
    num_completion_tokens=7000,
    prefill_tokens_per_s=120.5,
    decode_tokens_per_s=900.0,
    mean_step_s=0.0125,
    estimated_queue_s=0.75,
    num_engine_restarts=1,
    ttft=Percentiles(p50_s=0.05, p90_s=0.1, p99_s=0.2, num=11),
    itl=Percentiles(p50_s=0.012, p90_s=0.014, p99_s=0.03, num=7000),
    queue=Percentiles(p50_s=0.001, p90_s=0.01, p99_s=0.1, num=11),
    waits_for="BLOCKS",
)

SNAPSHOT = Snapshot(
    time_s=NOW_UNIX_S,
    uptime_s=7384.5,
    is_draining=False,
    models=(MODEL,),
    fronts=(
        FrontSnapshot(index=1, pid=4001, num_streams=6, num_live=5, num_backlog_tokens=17),
        FrontSnapshot(index=2, pid=4002, num_streams=3, num_live=3, num_backlog_tokens=0),
    ),
)


def request_view(number: int, **changes: Any) -> RequestView:
    """Return a request in decode, `number` seconds after the first."""
    arrival_s = NOW_UNIX_S - 100.0 + number
    view = RequestView(
        request_id=f"request-{number}",
        model="tiny",
        tenant="acme",
        state="PROCESSING",
        phase="decode",
        waits_for="",
        queue_position=None,
        priority=0,
        arrival_s=arrival_s,
        age_s=NOW_UNIX_S - arrival_s,
        num_prompt_tokens=96,
        num_cached_tokens=32,
        num_output_tokens=17,
        num_computed_tokens=112,
        num_blocks=8,
        num_preemptions=0,
        num_backlog_tokens=2,
        time_to_deadline_s=None,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        history=(
            PhaseChange(phase="prepare", since_s=arrival_s),
            PhaseChange(phase="queue", since_s=arrival_s + 0.25),
            PhaseChange(phase="prefill", since_s=arrival_s + 1.25),
            PhaseChange(phase="decode", since_s=arrival_s + 1.75),
        ),
    )
    return dataclasses.replace(view, **changes)


def waiting_view(number: int, **changes: Any) -> RequestView:
    given: dict[str, Any] = {
        "state": "PENDING",
        "phase": "queue",
        "waits_for": "BLOCKS",
        "queue_position": 0,
        "num_output_tokens": 0,
        "num_computed_tokens": 0,
        "num_blocks": 0,
        **changes,
    }
    return request_view(number, **given)


class FakeDesk(Operations):
    """Returns what its attributes hold, and records the commands it received."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = [SNAPSHOT]
        self.requests: tuple[RequestView, ...] = ()
        self.recording: bytes = b""
        self.profile_pieces: tuple[bytes, ...] = (b"speed", b"scope")
        self.error: OperationsError | None = None
        self.told: list[tuple[Any, ...]] = []
        self.asked = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.on_snapshot: Callable[[], None] = lambda: None

    def snapshot(self) -> Snapshot:
        self.on_snapshot()
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    async def live_requests(self) -> tuple[RequestView, ...]:
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        self._may_fail()
        return self.requests

    async def drain(self, timeout_s: float | None) -> int:
        self._may_fail()
        self.told.append(("drain", timeout_s))
        return len(self.requests)

    async def flight_record(self) -> bytes:
        self._may_fail()
        return self.recording

    async def dump_flight_record(self, why: str) -> Path:
        self._may_fail()
        self.told.append(("dump", why))
        return Path("/var/flight") / f"{why}.bin"

    async def set_log_level(self, level: str) -> None:
        self._may_fail()
        self.told.append(("log_level", level))

    async def profile(self, process: str, seconds: float) -> AsyncIterator[bytes]:
        self._may_fail()
        self.told.append(("profile", process, seconds))
        for piece in self.profile_pieces:
            yield piece

    def _may_fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclasses.dataclass(frozen=True, slots=True)
class ServedDesk:
    desk: FakeDesk
    server: OperationsServer
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> pb_grpc.OperationsServiceAsyncStub:
        stub: Any = pb_grpc.OperationsServiceStub(self.channel)
        return stub  # type: ignore[no-any-return] # the stub of an aio channel is the async one


@contextlib.asynccontextmanager
async def serving_desk(desk: FakeDesk | None = None, port: int = 0) -> AsyncGenerator[ServedDesk]:
    """Start the operations server on a real socket."""
    desk = desk or FakeDesk()
    server = OperationsServer(desk, "127.0.0.1", port)
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield ServedDesk(desk, server, address, channel)
    finally:
        await server.stop()


def beat(front_id: int = 1, *outcomes: OutcomeCount, **changes: Any) -> Heartbeat:
    """Return a report of a front that has two requests."""
    return metric_beat(front_id, *outcomes, **{"num_streams": 2, "num_live": 2, **changes})


def step_rows(num_steps: int, at_s: Callable[[int], float], **changes: Any) -> NDArray[Any]:
    """Return steps whose results arrived at `at_s` of their index; the rest is the same for
    each.
    """
    rows = np.zeros(num_steps, dtype=STEP)
    rows["itl_s"] = math.nan
    for index in range(num_steps):
        ended_s = at_s(index)
        rows[index]["step"] = index
        for name, before_s in (("begun_s", 0.01), ("launched_s", 0.008), ("collected_s", 0.002)):
            rows[index][name] = ended_s - before_s
        rows[index]["updated_s"] = ended_s
    for name, value in changes.items():
        rows[name] = value
    return rows


def live_view(key: int, request_id: str = "mine", **changes: Any) -> LiveView:
    given: dict[str, Any] = {
        "tenant": "",
        "output_index": 0,
        "state": RequestState.PROCESSING,
        "priority": 0,
        "arrival_s": 50.0,
        "deadline_s": math.inf,
        "num_prompt_tokens": 10,
        "num_output_tokens": 3,
        "num_computed_tokens": 12,
        "num_blocks": 2,
        "num_preemptions": 0,
        "slot": 0,
        **changes,
    }
    return LiveView(key=key, request_id=request_id, **given)


def front_view(keys: Sequence[int], request_id: str = "mine", **changes: Any) -> FrontView:
    """Return the request of these outputs."""
    given: dict[str, Any] = {
        "front_id": 1,
        "tenant": "",
        "priority": 0,
        "trace_id": "ab" * 16,
        "arrival_s": 50.0,
        "phase": "decode",
        "history": (("prepare", 50.0), ("queue", 50.1), ("prefill", 50.2), ("decode", 50.3)),
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": 2,
        "num_preemptions": 0,
        "num_backlog_tokens": 1,
        **changes,
    }
    return FrontView(keys=tuple(keys), request_id=request_id, **given)


class Ticks:
    """A clock that the test sets."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def numbered(views: int) -> tuple[RequestView, ...]:
    """Return the given number of requests in order of arrival."""
    return tuple(request_view(number) for number in itertools.islice(itertools.count(), views))


def small_recording(num_steps: int = 6) -> bytes:
    """Return a flight recording: in each step a request of tenant acme arrives and one ends."""
    facts = FlightFacts(
        model="tiny",
        executor="scripted",
        epoch=1,
        max_num_seqs=8,
        num_blocks=100,
        block_size=16,
        max_num_batched_tokens=2048,
        pipeline_depth=1,
        is_self_paced=False,
        clock_s=1000.0,
        unix_s=NOW_UNIX_S,
        version="1",
    )
    fd = create_memory(64, "test")
    memory = RingMemory(fd, facts)
    rows = step_rows(
        num_steps,
        lambda index: 1000.0 + index,
        predicted_s=0.5,
        num_prefill_tokens=20,
        num_prefill_rows=1,
        num_decodes=2,
        num_running=3,
        num_waiting=1,
        waits_for=2,
        num_used_blocks=40,
        num_cached_blocks=10,
        num_free_blocks=50,
        num_admitted=1,
        num_finished=1,
    )
    # Each request has the number of the step that it came in for a key, and in its name.
    for key, row in enumerate(rows):
        at_s = float(row["updated_s"])
        names = (f"r{key}".encode(), b"acme")
        numbers = (math.inf, math.inf, 20, 64, 0, 0)
        memory.append(REQUEST_RING, key, at_s, *numbers, bytes(16), *names)
        memory.append(STEP_RING, *row.item())
        for kind, of_key in ((EventKind.CHUNK, key), (EventKind.ADMITTED, key)):
            memory.append(EVENT_RING, at_s, key, of_key, 0, 20, kind, 0)
        if key:
            memory.append(EVENT_RING, at_s, key, key - 1, 0, 5, EventKind.FINISHED, 1)
    reader = FlightReader(fd)
    try:
        return reader.copy(1000.0 + num_steps)
    finally:
        reader.close()
        memory.close()
        os.close(fd)


async def refusal(call: Any) -> RichError:
    """Return the error of a call; for a stream, of reading its next message."""
    ended = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(ended, PATIENCE_S)
    return rich_error(caught.value)
