"""Flight records over OperationsService, as messages and as files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from penstock.server.front.errors import request_error
from penstock.server.rpc import operations_methods
from penstock.v1 import operations_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import rich_error
from support.operations_server import ServedOperations, rejection
from support.reports import small_recording
from support.snapshots import NOW_UNIX_S
from support.timeout import TEST_TIMEOUT_S


async def test_the_flight_record_as_steps(operations: ServedOperations) -> None:
    operations.fake.recording = small_recording()
    pieces = [piece async for piece in operations.stub.GetFlightRecord(pb.GetFlightRecordRequest())]
    steps = [step for piece in pieces for step in piece.steps.steps]

    assert [step.step for step in steps] == list(range(6))
    last = steps[-1]
    assert last.launch_time.ToMilliseconds() == round((NOW_UNIX_S + 5 - 0.008) * 1000)
    assert last.scheduler_duration.ToMicroseconds() == 4000
    assert last.executor_duration.ToMicroseconds() == 6000
    assert last.predicted_duration.ToMilliseconds() == 500
    assert not last.HasField("inter_token_duration")
    assert list(last.admitted_request_ids) == ["r5"]
    assert list(last.ended_request_ids) == ["r4"]
    assert [(share.request_id, share.num_tokens) for share in last.shares] == [("r5", 20)]
    assert (last.num_waiting, last.wait_reason) == (1, state_pb2.WAIT_REASON_SLOTS)
    assert (last.cache.num_total_blocks, last.cache.block_size_tokens) == (100, 16)
    assert (last.num_running, last.num_decode_outputs, last.num_finished) == (3, 2, 1)


async def test_the_flight_record_as_files(
    operations: ServedOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_methods, "MAX_CHUNK_BYTES", 1000)
    operations.fake.recording = small_recording()

    async def file(file_format: pb.FlightRecordFormat.ValueType) -> list[bytes]:
        request = pb.GetFlightRecordRequest(format=file_format)
        return [piece.file_chunk async for piece in operations.stub.GetFlightRecord(request)]

    raw = await file(pb.FLIGHT_RECORD_FORMAT_RAW)
    assert b"".join(raw) == operations.fake.recording
    assert max(map(len, raw)) == 1000
    perfetto = json.loads(b"".join(await file(pb.FLIGHT_RECORD_FORMAT_PERFETTO)))
    assert perfetto["traceEvents"]


RAW = pb.GetFlightRecordRequest(format=pb.FLIGHT_RECORD_FORMAT_RAW)
MORE_THAN_IS_BUFFERED = bytes(32 << 20)


async def test_stalled_readers_block_no_other(
    operations: ServedOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_FLIGHT_WRITE_S", "MAX_FLIGHT_READ_S"):
        monkeypatch.setattr(operations_methods, limit, 10 * TEST_TIMEOUT_S)  # they are not cut
    operations.fake.recording = MORE_THAN_IS_BUFFERED
    stalled = [operations.stub.GetFlightRecord(RAW) for _ in range(3)]
    async with asyncio.timeout(TEST_TIMEOUT_S):
        for call in stalled:
            await call.read()
        operations.fake.recording = small_recording()
        pieces = [piece.file_chunk async for piece in operations.stub.GetFlightRecord(RAW)]
    assert b"".join(pieces) == operations.fake.recording
    for call in stalled:
        call.cancel()


async def test_readers_of_a_flight_record_are_limited(
    operations: ServedOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_methods, "MAX_FLIGHT_READERS", 1)
    operations.fake.recording = MORE_THAN_IS_BUFFERED
    first = aiter(operations.stub.GetFlightRecord(RAW))
    await anext(first)

    error = await rejection(operations.stub.GetFlightRecord(RAW))
    assert (error.code, error.info.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "NOT_POSSIBLE_NOW",
    )
    assert await remaining_events(first)
    operations.fake.recording = small_recording()
    assert [piece async for piece in operations.stub.GetFlightRecord(RAW)], (
        "its place is free again"
    )


@pytest.mark.parametrize("limit", ["MAX_FLIGHT_WRITE_S", "MAX_FLIGHT_READ_S"])
async def test_a_stalled_reader_of_a_flight_record_is_disconnected(
    operations: ServedOperations, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(operations_methods, limit, 0.05)
    operations.fake.recording = MORE_THAN_IS_BUFFERED
    pieces = aiter(operations.stub.GetFlightRecord(RAW))
    cut = asyncio.Event()
    monkeypatch.setattr(
        operations_methods, "request_error", setting_when_called(request_error, cut)
    )
    await anext(pieces)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await cut.wait()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await remaining_events(pieces)
    assert rich_error(caught.value).info.reason == "READER_STALLED"


async def remaining_events(pieces: AsyncIterator[pb.GetFlightRecordResponse]) -> list[bytes]:
    return [piece.file_chunk async for piece in pieces]


def setting_when_called(request_error: Callable[..., Exception], event: asyncio.Event) -> Any:
    def rejecting(*args: Any) -> Exception:
        event.set()
        return request_error(*args)

    return rejecting
