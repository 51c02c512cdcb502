"""The life cycle of a front server: its address, health and drain, and the reflection and channelz
services.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from penstock.server.front.config import FrontConfig
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import ServedFront, collect, rich_error, serving, text_of
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = (
    "",
    "penstock.v1.GenerationService",
    "penstock.v1.ModelService",
)


def health_stub(served: ServedFront) -> Any:
    """Return a stub of the health service; untyped, because grpc_health has no types."""
    return cast("Any", health_pb2_grpc.HealthStub)(served.channel)


async def test_health_follows_the_engine(served: ServedFront) -> None:
    health = health_stub(served)

    async def check(service: str) -> int:
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)

    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[1]))
    async with asyncio.timeout(TEST_TIMEOUT_S):
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


async def test_health_is_not_serving_before_the_engine_came(text: ModelText) -> None:
    async with serving(text, is_up=False) as served:
        health = health_stub(served)
        response = await health.Check(health_pb2.HealthCheckRequest())
        assert response.status == NOT_SERVING


async def test_drain_lets_live_requests_finish_and_rejects_new_ones(served: ServedFront) -> None:
    health = health_stub(served)
    watch = health.Watch(health_pb2.HealthCheckRequest())
    call = served.stub.Generate(text_request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        assert (await watch.read()).status == SERVING
        drain = asyncio.ensure_future(served.server.drain(TEST_TIMEOUT_S))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GenerateOnce(pb.GenerateOnceRequest(generation=text_request()))
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.info.reason == "DRAINING"
        assert error.retry_s is not None
        served.port.come_up(epoch=1)  # health stays down whatever the engine reports
        assert not served.server.health.is_serving
        assert not drain.done()
        # After the hello the front submits the lost request again, and the drain waits for it.
        (again,) = await served.port.next_submission()
        served.port.finish(again.key)
        assert (await collect(call))[-1].HasField("finished")
        await drain


async def test_a_request_after_the_last_one_ended_in_a_drain_is_rejected(
    served: ServedFront,
) -> None:
    """The server rejects such a request with DRAINING; gRPC core would cancel a call that arrives
    during its shutdown.
    """
    call = served.stub.Generate(text_request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    drain = asyncio.ensure_future(served.server.drain(TEST_TIMEOUT_S))
    served.port.finish(spec.key)
    await collect(call)

    for _ in range(20):
        late = [served.stub.Generate(text_request()) for _ in range(10)]
        ends = await asyncio.gather(*map(collect, late), return_exceptions=True)
        for end in ends:
            assert isinstance(end, grpc.aio.AioRpcError)
            assert rich_error(end).info.reason == "DRAINING"
    await asyncio.wait_for(drain, TEST_TIMEOUT_S)


async def test_drain_ends_the_rest_with_unavailable(served: ServedFront) -> None:
    call = served.stub.Generate(text_request())
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    served.port.send(spec.key, served.encode("prefix"))
    stream = aiter(call)
    received: list[pb.GenerateResponse] = []
    while not text_of(received):
        received.append(await asyncio.wait_for(anext(stream), TEST_TIMEOUT_S))
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


async def test_watchers_do_not_delay_a_drain(served: ServedFront) -> None:
    health = health_stub(served)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await served.server.drain(3600.0)


async def test_address_in_use_is_an_error(text: ModelText) -> None:
    exclusive = (("grpc.so_reuseport", 0),)
    async with serving(text, extra_options=exclusive) as served:
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
    async with asyncio.timeout(TEST_TIMEOUT_S):
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


async def test_two_fronts_share_a_port(text: ModelText) -> None:
    async with serving(text) as served:
        second = FrontServer(text, FrontConfig(front_id=2))
        bound = await second.start(served.address)
        assert served.address.endswith(f":{bound}")
        await second.stop()
