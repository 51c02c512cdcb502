"""Limits of health and reflection calls, on a connection that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from penstock.server.rpc import reflection
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.health import Health
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageQueue
from penstock.server.rpc.read_limiter import MAX_UNAUTHENTICATED_READS, RequestReadLimiter
from support.timeout import TEST_TIMEOUT_S

WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"


class FakeContext:
    """A call context. Reads return `messages`, and then block forever. Every write blocks
    forever.
    """

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)
        self.is_writing = asyncio.Event()
        self.codes: list[grpc.StatusCode] = []
        self.num_reads = 0

    async def read(self) -> bytes:
        self.num_reads += 1
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def write(self, message: object) -> None:
        del message
        self.is_writing.set()
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, *details: object) -> None:
        del details
        self.codes.append(code)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return f"played:{id(self)}"


class _FakeServer:
    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        self.handlers.extend(generic_rpc_handlers)


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class LimitedServices:
    """The health and reflection services with these limits, without a server."""

    def __init__(
        self,
        *,
        max_arrival_s: float = 3600.0,
        max_stall_s: float = 3600.0,
        max_calls: float = 9,
        large_messages: LargeMessageQueue | None = None,
    ) -> None:
        self._harness = _FakeServer()
        limiter = RequestReadLimiter(
            cast(Any, self._harness),
            AccessControl(),
            max_arrival_s=max_arrival_s,
            max_stall_s=max_stall_s,
            max_calls=max_calls,
            large_messages=large_messages,
        )
        health = Health((), max_stall_s=max_stall_s)
        health_pb2_grpc.add_HealthServicer_to_server(health, cast(Any, limiter))
        reflection.add_reflection(limiter, ())

    async def call(self, path: str, wire: FakeContext) -> None:
        for handler in self._harness.handlers:
            found = handler.service(_Details(path))
            if found is not None:
                async with asyncio.timeout(TEST_TIMEOUT_S):
                    await (found.stream_stream or found.stream_unary)(None, wire)
                return
        raise AssertionError(path)


@pytest.mark.parametrize(("path", "data"), [(WATCH, b""), (REFLECTION, LIST_SERVICES)])
async def test_a_call_whose_reader_stalls_is_ended(path: str, data: bytes) -> None:
    wire = FakeContext(data)
    with pytest.raises(asyncio.CancelledError):
        await LimitedServices(max_stall_s=0.01).call(path, wire)
    assert wire.is_writing.is_set()


@pytest.mark.parametrize("path", [WATCH, CHECK, REFLECTION])
async def test_a_first_message_that_does_not_come_ends_the_call(path: str) -> None:
    wire = FakeContext()
    with pytest.raises(grpc.aio.AbortError):
        await LimitedServices(max_arrival_s=0.01).call(path, wire)
    assert wire.codes == [grpc.StatusCode.DEADLINE_EXCEEDED]


async def test_a_long_health_check_request_is_rejected() -> None:
    wire = FakeContext(b"\x0a\x80\x40" + b"x" * 8192)
    with pytest.raises(grpc.aio.AbortError):
        await LimitedServices().call(CHECK, wire)
    assert wire.codes == [grpc.StatusCode.INVALID_ARGUMENT]


async def test_unauthenticated_calls_of_one_service_use_no_slots_of_another() -> None:
    played = LimitedServices(max_calls=1)
    first = FakeContext(b"")
    watch = asyncio.create_task(played.call(WATCH, first))
    await first.is_writing.wait()
    second, question = FakeContext(b""), FakeContext(LIST_SERVICES)
    with pytest.raises(grpc.aio.AbortError):
        await played.call(WATCH, second)
    assert second.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    other = asyncio.create_task(played.call(REFLECTION, question))
    await question.is_writing.wait()
    for task in (watch, other):
        task.cancel()
    await asyncio.wait([watch, other])


async def test_what_waits_for_its_turn_counts_as_being_read() -> None:
    now_s = iter((0.0, 3600.0))
    large_messages = LargeMessageQueue(lambda: next(now_s))
    # Its handling takes an hour, so the next message may be read in an hour.
    await large_messages.acquire("another")
    num_calls = 40
    played = LimitedServices(max_calls=num_calls, large_messages=large_messages)
    wires = [FakeContext(b"x" * LARGE_BYTES) for _ in range(num_calls)]
    tasks = [asyncio.create_task(played.call(CHECK, wire)) for wire in wires]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum(wire.num_reads for wire in wires) == MAX_UNAUTHENTICATED_READS
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
