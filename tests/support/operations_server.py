"""The operations server over scripted data."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import (
    OperationsError,
    RequestView,
    Snapshot,
)
from penstock.server.rpc.operations_service import OperationsServer
from penstock.v1 import operations_service_pb2_grpc as pb_grpc
from support.fronts import RichError, rich_error
from support.snapshots import SNAPSHOT
from support.timeout import TEST_TIMEOUT_S


class FakeOperations(Operations):
    """Operations that return the attributes of this object or raise `error`, and record received
    commands in `commands`. `hold`: if set, `live_requests` waits for this event.
    """

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = [SNAPSHOT]
        self.requests: tuple[RequestView, ...] = ()
        self.recording: bytes = b""
        self.error: OperationsError | None = None
        self.commands: list[tuple[Any, ...]] = []
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
        self.commands.append(("drain", timeout_s))
        return len(self.requests)

    async def flight_record(self) -> bytes:
        self._may_fail()
        return self.recording

    async def dump_flight_record(self, why: str) -> Path:
        self._may_fail()
        self.commands.append(("dump", why))
        return Path("/var/flight") / f"{why}.bin"

    async def set_log_level(self, level: str) -> None:
        self._may_fail()
        self.commands.append(("log_level", level))

    async def profile(self, process: str, seconds: float) -> AsyncIterator[bytes]:
        self._may_fail()
        self.commands.append(("profile", process, seconds))
        for piece in (b"speed", b"scope"):
            yield piece

    def _may_fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclasses.dataclass(frozen=True, slots=True)
class ServedOperations:
    fake: FakeOperations
    server: OperationsServer
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> pb_grpc.OperationsServiceAsyncStub:
        return pb_grpc.OperationsServiceStub(self.channel)


@contextlib.asynccontextmanager
async def serving_operations(
    fake: FakeOperations | None = None, port: int = 0
) -> AsyncGenerator[ServedOperations]:
    fake = fake or FakeOperations()
    server = OperationsServer(fake, "127.0.0.1", port)
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield ServedOperations(fake, server, address, channel)
    finally:
        await server.stop()


async def rejection(call: Any) -> RichError:
    """Return the error of a call; for a stream, of reading its next message."""
    ended = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(ended, TEST_TIMEOUT_S)
    return rich_error(caught.value)
