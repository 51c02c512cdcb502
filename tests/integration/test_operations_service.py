"""OperationsService over a real socket: its responses, rejections, port and shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from penstock.server.observe.operations.snapshot import OperationsError
from penstock.server.rpc.operations_service import OperationsServer
from penstock.v1 import model_pb2, state_pb2
from penstock.v1 import operations_service_pb2 as pb
from support.operations_server import (
    FakeOperations,
    ServedOperations,
    rejection,
    serving_operations,
)
from support.snapshots import MODEL, SNAPSHOT
from support.timeout import TEST_TIMEOUT_S


def duration(value_s: float) -> Duration:
    message = Duration()
    message.FromMicroseconds(round(value_s * 1e6))
    return message


@pytest.mark.parametrize(
    ("is_draining", "is_up", "epoch", "state"),
    [
        (True, True, 1, model_pb2.MODEL_STATE_DRAINING),
        (False, False, 0, model_pb2.MODEL_STATE_LOADING),
        (False, False, 1, model_pb2.MODEL_STATE_RECOVERING),
    ],
)
async def test_the_state_of_a_model(
    operations: ServedOperations, is_draining: bool, is_up: bool, epoch: int, state: int
) -> None:
    model = dataclasses.replace(MODEL, is_up=is_up, epoch=epoch, mean_step_s=None)
    operations.fake.snapshots = [
        dataclasses.replace(SNAPSHOT, is_draining=is_draining, models=(model,))
    ]
    stats = (await operations.stub.GetStats(pb.GetStatsRequest(model="tiny"))).stats

    assert stats.models[0].state == state
    assert not stats.models[0].HasField("mean_step_duration")


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.GetStats(pb.GetStatsRequest(model="other")),
        lambda stub: stub.WatchStats(pb.WatchStatsRequest(model="other")),
        lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest(model="other")),
        lambda stub: stub.GetFlightRecord(pb.GetFlightRecordRequest(model="other")),
        lambda stub: stub.DumpFlightRecord(pb.DumpFlightRecordRequest(model="other")),
    ],
)
async def test_an_unknown_model_is_not_found(operations: ServedOperations, call: Any) -> None:
    error = await rejection(call(operations.stub))

    assert (error.code, error.info.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert error.info.metadata["model"] == "other"


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (lambda stub: stub.WatchStats(pb.WatchStatsRequest(interval=duration(0.05))), ["interval"]),
        (lambda stub: stub.WatchStats(pb.WatchStatsRequest(interval=duration(-1))), ["interval"]),
        (lambda stub: stub.WatchStats(pb.WatchStatsRequest(interval=duration(3601))), ["interval"]),
        (
            lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_size=0)),
            ["page_size"],
        ),
        (
            lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_size=1001)),
            ["page_size"],
        ),
        (
            lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_token="x")),
            ["page_token"],
        ),
        (
            lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_token="ü")),
            ["page_token"],
        ),
        (
            lambda stub: stub.ListLiveRequests(
                pb.ListLiveRequestsRequest(page_size=0, state=state_pb2.REQUEST_STATE_ERROR)
            ),
            ["page_size", "state"],
        ),
        (
            lambda stub: stub.ListLiveRequests(cast("Any", pb.ListLiveRequestsRequest)(state=77)),
            ["state"],
        ),
        (lambda stub: stub.GetLiveRequest(pb.GetLiveRequestRequest()), ["request_id"]),
        (lambda stub: stub.Drain(pb.DrainRequest(drain_timeout=duration(-1))), ["drain_timeout"]),
        (lambda stub: stub.SetLogLevel(pb.SetLogLevelRequest()), ["level"]),
        (lambda stub: stub.SetLogLevel(cast("Any", pb.SetLogLevelRequest)(level=9)), ["level"]),
        (
            lambda stub: stub.GetFlightRecord(pb.GetFlightRecordRequest(max_steps=0)),
            ["max_steps"],
        ),
        (
            lambda stub: stub.GetFlightRecord(
                pb.GetFlightRecordRequest(max_steps=5, format=pb.FLIGHT_RECORD_FORMAT_RAW)
            ),
            ["max_steps"],
        ),
        (
            lambda stub: stub.GetFlightRecord(cast("Any", pb.GetFlightRecordRequest)(format=9)),
            ["format"],
        ),
        (lambda stub: stub.Profile(pb.ProfileRequest(duration=duration(0))), ["duration"]),
        (lambda stub: stub.Profile(pb.ProfileRequest(duration=duration(60.1))), ["duration"]),
        (
            lambda stub: stub.Profile(pb.ProfileRequest(process=pb.SERVER_PROCESS_FRONT)),
            ["front_index"],
        ),
        (lambda stub: stub.Profile(pb.ProfileRequest(front_index=1)), ["front_index"]),
        (lambda stub: stub.Profile(cast("Any", pb.ProfileRequest)(process=9)), ["process"]),
    ],
)
async def test_bad_fields_are_named(
    operations: ServedOperations, call: Any, fields: list[str]
) -> None:
    error = await rejection(call(operations.stub))

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields == fields
    assert operations.fake.commands == []


async def test_malformed_bytes_are_reported_as_such(operations: ServedOperations) -> None:
    path = "/penstock.v1.OperationsService/GetStats"
    error = await rejection(cast("Any", operations.channel.unary_unary(path))(b"\xff\xff"))

    assert (error.code, error.info.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_REQUEST",
    )


async def test_a_watch_ends_when_the_server_stops(operations: ServedOperations) -> None:
    call = operations.stub.WatchStats(pb.WatchStatsRequest(interval=duration(3600)))
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await call.read()
        await operations.server.stop()
    error = await rejection(call)

    assert (error.code, error.info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.ListLiveRequests(pb.ListLiveRequestsRequest()),
        lambda stub: stub.GetLiveRequest(pb.GetLiveRequestRequest(request_id="r")),
        lambda stub: stub.Drain(pb.DrainRequest()),
        lambda stub: stub.SetLogLevel(pb.SetLogLevelRequest(level=pb.LOG_LEVEL_INFO)),
        lambda stub: stub.GetFlightRecord(pb.GetFlightRecordRequest()),
        lambda stub: stub.DumpFlightRecord(pb.DumpFlightRecordRequest()),
        lambda stub: stub.Profile(pb.ProfileRequest()),
    ],
)
async def test_an_operations_error_is_reported_with_its_reason(
    operations: ServedOperations, call: Any
) -> None:
    operations.fake.error = OperationsError("the engine does not respond")
    error = await rejection(call(operations.stub))

    assert (error.code, error.info.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "NOT_POSSIBLE_NOW",
    )
    assert error.message == "the engine does not respond"
    assert error.pushback_ms is None


async def test_a_fault_is_reported_without_its_text(operations: ServedOperations) -> None:
    operations.fake.error = cast("Any", RuntimeError("a secret"))
    error = await rejection(operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest()))

    assert error.code is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    assert operations.server.num_internal_errors == 1


async def test_health_and_reflection_are_served(operations: ServedOperations) -> None:
    health = cast("Any", health_pb2_grpc.HealthStub)(operations.channel)
    for service in ("", "penstock.v1.OperationsService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    call = operations.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = cast("Any", await call.read())
        await call.done_writing()
    names = {service.name for service in listed.list_services_response.service}
    assert "penstock.v1.OperationsService" in names
    assert "penstock.v1.GenerationService" not in names


async def test_the_operations_port_does_not_serve_generation(operations: ServedOperations) -> None:
    path = "/penstock.v1.GenerationService/Cancel"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cast("Any", operations.channel.unary_unary(path))(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_that_is_taken_is_an_error(operations: ServedOperations) -> None:
    port = int(operations.address.rpartition(":")[2])
    with pytest.raises(OSError, match="cannot listen on"):
        await OperationsServer(FakeOperations(), "127.0.0.1", port).start()


async def test_a_reserved_port_is_taken_over() -> None:
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        port = reservation.getsockname()[1]
        server = OperationsServer(FakeOperations(), "127.0.0.1", port, is_port_reserved=True)
        assert await server.start() == port
        await server.stop()
        await server.stop()


async def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.rpc.operations_service.MAX_CALLS", 3)
    fake = FakeOperations()
    fake.hold = asyncio.Event()
    async with serving_operations(fake) as operations, asyncio.timeout(TEST_TIMEOUT_S):
        calls = [operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest()) for _ in range(8)]
        ends = [asyncio.ensure_future(call.code()) for call in calls]
        # The rejected calls end first; the others are then released.
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        fake.hold.set()
        codes = await asyncio.gather(*ends)
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK}
