"""Lifecycle of a front server and its services: drain, health, reflection, channelz, options."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from penstock.server.front.config import FrontConfig
from penstock.server.rpc.options import KeepaliveConfig
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2, model_service_pb2_grpc
from support.fronts import PATIENCE_S, ServedFront, collect, rich_error, serving, text_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = (
    "",
    "penstock.v1.GenerationService",
    "penstock.v1.ModelService",
)


def health_stub(served: ServedFront) -> Any:
    """Return a health stub; untyped, because grpc_health is."""
    return cast("Any", health_pb2_grpc.HealthStub)(served.channel)


def request() -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.text_prompt.text = "hello"
    return message


async def test_health_follows_the_engine(served: ServedFront) -> None:
    health = health_stub(served)

    async def check(service: str) -> int:
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)

    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[1]))
    async with asyncio.timeout(PATIENCE_S):
        assert (await watch.read()).status == SERVING
        for service in SERVICES:
            assert await check(service) == SERVING
        served.port.go_down()
        assert (await watch.read()).status == NOT_SERVING
        for service in SERVICES:
            assert await check(service) == NOT_SERVING
        served.port.come_up(epoch=2)
        assert (await watch.read()).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check("no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch.cancel()


async def test_health_says_not_serving_before_the_engine_came(text: ModelText) -> None:
    async with serving(text, is_up=False) as served:
        health = health_stub(served)
        response = await health.Check(health_pb2.HealthCheckRequest())
        assert response.status == NOT_SERVING


async def test_drain_lets_live_requests_finish_and_refuses_new_ones(served: ServedFront) -> None:
    health = health_stub(served)
    watch = health.Watch(health_pb2.HealthCheckRequest())
    call = served.stub.Generate(request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    async with asyncio.timeout(PATIENCE_S):
        assert (await watch.read()).status == SERVING
        drain = asyncio.ensure_future(served.server.drain(PATIENCE_S))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GenerateOnce(pb.GenerateOnceRequest(generation=request()))
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.info.reason == "DRAINING"
        assert error.retry_s is not None
        served.port.come_up(epoch=1)  # health stays down whatever the engine reports
        assert not served.server.health.is_serving
        assert not drain.done()
        # The hello brings back what an engine had lost, and the drain waits for it.
        (again,) = await served.port.next_submission()
        served.port.finish(again.key)
        assert (await collect(call))[-1].HasField("finished")
        await drain


async def test_drain_waits_for_the_last_token(served: ServedFront) -> None:
    call = served.stub.Generate(request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    drain = asyncio.ensure_future(served.server.drain(PATIENCE_S))
    served.port.send(spec.key, served.encode("to the end"))
    served.port.finish(spec.key)
    async with asyncio.timeout(PATIENCE_S):
        responses = [response async for response in call]
        await drain
    assert text_of(responses) == "to the end"
    assert responses[-1].WhichOneof("event") == "finished"


async def test_who_comes_when_the_last_has_gone_is_refused(served: ServedFront) -> None:
    """Rejected, not cancelled as gRPC core does with calls that arrive while it shuts down."""
    call = served.stub.Generate(request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    drain = asyncio.ensure_future(served.server.drain(PATIENCE_S))
    served.port.finish(spec.key)
    await collect(call)

    for _ in range(20):
        late = [served.stub.Generate(request()) for _ in range(10)]
        ends = await asyncio.gather(*map(collect, late), return_exceptions=True)
        for end in ends:
            assert isinstance(end, grpc.aio.AioRpcError)
            assert rich_error(end).info.reason == "DRAINING"
    await asyncio.wait_for(drain, PATIENCE_S)


async def test_drain_ends_the_rest_with_unavailable(served: ServedFront) -> None:
    call = served.stub.Generate(request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    served.port.send(spec.key, served.encode("prefix"))
    stream = aiter(call)
    received: list[pb.GenerateResponse] = []
    while not text_of(received):
        received.append(await asyncio.wait_for(anext(stream), PATIENCE_S))
    await served.server.drain(0.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.info.reason == "DRAINING"
    assert "prefix".startswith(text_of(received))
    keys, _ = await served.port.next_cancel()
    assert keys == (spec.key,)
    assert served.server.num_live_requests == 0


async def test_drain_is_not_held_up_by_watchers(served: ServedFront) -> None:
    health = health_stub(served)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    async with asyncio.timeout(PATIENCE_S):
        await served.server.drain(3600.0)


async def test_address_in_use_is_an_error(text: ModelText) -> None:
    exclusive = (("grpc.so_reuseport", 0),)
    async with serving(text, extra_options=exclusive) as served:
        from penstock.server.rpc.server import FrontServer

        second = FrontServer(text, FrontConfig(), extra_options=exclusive)
        with pytest.raises(OSError, match="cannot listen"):
            await second.start(served.address)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes(served: ServedFront, version: str) -> None:
    service = f"grpc.reflection.{version}.ServerReflection"
    call = served.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    async with asyncio.timeout(PATIENCE_S):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        assert isinstance(listed, reflection_pb2.ServerReflectionResponse)
        names = {service.name for service in listed.list_services_response.service}
        assert {
            *SERVICES[1:],
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        } == names
        for name in names:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            answer = await call.read()
            assert isinstance(answer, reflection_pb2.ServerReflectionResponse)
            files = answer.file_descriptor_response.file_descriptor_proto
            packages = [FileDescriptorProto.FromString(file).package for file in files]
            assert name.rpartition(".")[0] in packages
        await call.done_writing()


async def test_channelz_answers(served: ServedFront) -> None:
    channelz = cast("Any", channelz_pb2_grpc.ChannelzStub)(served.channel)
    response = await channelz.GetServers(channelz_pb2.GetServersRequest(start_server_id=0))
    assert response.server


async def test_unknown_method_and_service_are_unimplemented(served: ServedFront) -> None:
    for path in (
        "/penstock.v1.GenerationService/Nothing",
        "/no.such.Service/Method",
        "/penstock.v1.OperationsService/GetStats",  # on a separate port, for operators
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cast("Any", served.channel.unary_unary(path))(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS, PING, GOAWAY = 4, 6, 7


@contextlib.asynccontextmanager
async def raw_connection(
    address: str,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open an HTTP/2 connection whose frames the test sends."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(PREFACE)
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def next_frame(reader: asyncio.StreamReader, *kinds: int) -> tuple[int, int, bytes]:
    """Return the next frame of one of `kinds`: its kind, flags and body."""
    while True:
        header = await reader.readexactly(9)
        body = await reader.readexactly(int.from_bytes(header[:3], "big"))
        if header[3] in kinds:
            return header[3], header[4], body


async def test_streams_and_header_size_are_bounded_on_the_wire(served: ServedFront) -> None:
    async with raw_connection(served.address) as (reader, _):
        _, _, body = await next_frame(reader, SETTINGS)
    settings = dict(struct.iter_unpack(">HI", body))
    assert settings[3] == 1024, "SETTINGS_MAX_CONCURRENT_STREAMS"
    assert settings[6] == 16384, "SETTINGS_MAX_HEADER_LIST_SIZE"


@pytest.mark.parametrize(("interval_s", "last"), [(0.0, PING), (3600.0, GOAWAY)])
async def test_clients_that_ping_too_often_are_sent_away(
    text: ModelText, interval_s: float, last: int
) -> None:
    keepalive = KeepaliveConfig(min_client_ping_interval_s=interval_s)
    async with (
        serving(text, keepalive=keepalive) as served,
        raw_connection(served.address) as (reader, writer),
    ):
        kinds = set()
        for index in range(10):
            writer.write(b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + index.to_bytes(8, "big"))
            kind, flags, body = await next_frame(reader, PING, GOAWAY)
            while kind == PING and not flags & 1:  # a ping of the server's own
                kind, flags, body = await next_frame(reader, PING, GOAWAY)
            kinds.add(kind)
            if kind == GOAWAY:
                assert b"too_many_pings" in body
                break
        assert last in kinds
        assert (GOAWAY in kinds) is (last == GOAWAY)


@pytest.mark.parametrize(("max_pending", "is_dropping"), [(None, False), (50, True)])
async def test_calls_that_arrive_at_once_are_not_dropped(
    text: ModelText, max_pending: int | None, is_dropping: bool
) -> None:
    names = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
    options = () if max_pending is None else tuple((name, max_pending) for name in names)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(text, extra_options=options))
        stubs: list[Any] = []
        for _ in range(3):  # a connection each, as one carries a limited number of calls
            channel = grpc.aio.insecure_channel(
                served.address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            await stack.enter_async_context(channel)
            stubs.append(model_service_pb2_grpc.ModelServiceStub(channel))
        request = model_service_pb2.ListModelsRequest()
        calls = [stubs[index % 3].ListModels(request) for index in range(1500)]
        async with asyncio.timeout(PATIENCE_S):
            codes = {await call.code() for call in calls}
    assert (codes != {grpc.StatusCode.OK}) is is_dropping


async def test_old_connections_are_asked_to_leave(text: ModelText) -> None:
    keepalive = KeepaliveConfig(max_connection_age_s=0.1, max_connection_age_grace_s=60.0)
    async with (
        serving(text, keepalive=keepalive) as served,
        raw_connection(served.address) as (reader, _),
    ):
        kind, _, _ = await next_frame(reader, GOAWAY)
        assert kind == GOAWAY


async def test_two_fronts_share_a_port(text: ModelText) -> None:
    from penstock.server.rpc.server import FrontServer

    async with serving(text) as served:
        second = FrontServer(text, FrontConfig(front_id=2))
        bound = await second.start(served.address)
        assert served.address.endswith(f":{bound}")
        await second.stop()


async def test_server_pings_a_silent_connection(text: ModelText) -> None:
    """The server's keepalive closes a connection that answers nothing."""
    keepalive = KeepaliveConfig(server_ping_interval_s=1.0, server_ping_timeout_s=0.2)
    async with (
        serving(text, keepalive=keepalive) as served,
        raw_connection(served.address) as (reader, _),
    ):
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                received += data
        assert received
