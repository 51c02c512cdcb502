"""Tenants that a metadata key identifies are isolated from each other, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.config import FrontConfig
from penstock.server.tenants import engine_request_id
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import ServedFront, collect, rich_error, serving
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S

KEY = "x-tenant"
CONFIG = FrontConfig(acceptance_delay_s=0.0, tenant_metadata_key=KEY)


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    async with serving(text, CONFIG) as served:
        yield served


def named(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((KEY, name) for name in names)


def request(request_id: str = "r") -> pb.GenerateRequest:
    return text_request(
        "a prompt that is longer than one block of the cache", request_id=request_id
    )


async def cancel(
    served: ServedFront, request_id: str, metadata: tuple[tuple[str, str], ...]
) -> pb.CancelResponse:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        return await served.stub.Cancel(pb.CancelRequest(request_id=request_id), metadata=metadata)


async def test_tenants_have_their_own_ids_requests_and_blocks(served: ServedFront) -> None:
    calls = {
        name: served.stub.Generate(request(), metadata=named(*([name] if name else [])))
        for name in ("a", "b", "")
    }
    specs = [(await served.port.next_submission())[0] for _ in calls]
    by_tenant = {spec.tenant: spec for spec in specs}
    assert set(by_tenant) == {"a", "b", ""}
    assert len({spec.request_id for spec in specs}) == 3
    assert by_tenant[""].request_id == "r"
    assert len({spec.hash_salt for spec in specs}) == 3
    assert not set(by_tenant["a"].block_hashes) & set(by_tenant["b"].block_hashes)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.stub.Generate(request(), metadata=named("a")))
    assert rich_error(caught.value).info.reason == "REQUEST_ID_IN_USE"

    for spec in specs:
        served.port.finish(spec.key)
    for call in calls.values():
        assert (await collect(call))[0].accepted.request_id == "r", "its own word for it"


async def test_no_tenant_can_cancel_requests_of_another(served: ServedFront) -> None:
    call = served.stub.Generate(request(), metadata=named("a"))
    (spec,) = await served.port.next_submission()
    for other in (named("b"), ()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cancel(served, "r", other)
        assert rich_error(caught.value).info.reason == "REQUEST_NOT_FOUND"
    assert served.port.cancelled == []
    assert (await cancel(served, "r", named("a"))).state == state_pb2.REQUEST_STATE_PENDING
    assert await served.port.next_cancel() == ((spec.key,), FinishReason.CANCELLED)
    served.port.finish(spec.key, FinishReason.CANCELLED)
    await collect(call)


async def test_a_request_of_another_front_is_its_tenants_too(served: ServedFront) -> None:
    served.port.known_elsewhere[engine_request_id("a", "far")] = RequestState.PROCESSING
    assert (await cancel(served, "far", named("a"))).state == state_pb2.REQUEST_STATE_PROCESSING
    for other in (named("b"), ()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cancel(served, "far", other)
        assert rich_error(caught.value).info.reason == "REQUEST_NOT_FOUND"


@pytest.mark.parametrize("names", [("",), ("a", "b"), ("a", "a"), ("a,b",), ("x" * 129,)])
async def test_an_invalid_tenant_name_is_rejected_with_the_metadata_key(
    served: ServedFront, names: tuple[str, ...]
) -> None:
    once = pb.GenerateOnceRequest(generation=request())
    for method in (
        lambda: collect(served.stub.Generate(request(), metadata=named(*names))),
        lambda: served.stub.GenerateOnce(once, metadata=named(*names)),
        lambda: cancel(served, "r", named(*names)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method()
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == ["metadata[x-tenant]"]
    assert served.server.num_live_requests == 0


async def test_without_a_key_all_callers_are_one_tenant(text: ModelText) -> None:
    async with serving(text) as served:
        call = served.stub.Generate(request(), metadata=named("a", "b"))
        (spec,) = await served.port.next_submission()
        assert (spec.tenant, spec.request_id) == ("", "r")
        served.port.finish(spec.key)
        await collect(call)
