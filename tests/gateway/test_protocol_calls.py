"""The gateway protocol over real sockets, with an engine that the test controls."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.service import MISSING_METHODS, SERVICE_NAME, VllmEngineService
from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.text.model_text import ModelText
from support.fronts import ServedFront, rich_error, serving
from support.security_files import ACME, OPERATOR, SecurityFiles, bearer_metadata
from support.timeout import TEST_TIMEOUT_S

CODE = grpc.StatusCode


def gateway(front: Front, access: AccessControl) -> VllmEngineService:
    return VllmEngineService(front, access, wall_clock=lambda: 1.8e9)


@pytest.fixture
async def served(text: ModelText) -> AsyncIterator[ServedFront]:
    async with serving(text, gateway=gateway) as served:
        yield served


async def ask(served: ServedFront, method: str, request: Any = None, **more: Any) -> Any:
    data = b"" if request is None else request.SerializeToString()
    call: Any = served.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
    answer: Any = getattr(vllm, f"{method}Response")
    return answer.FromString(await call(data, timeout=TEST_TIMEOUT_S, **more))


def generate(served: ServedFront, *, is_stream: bool = True, **params: Any) -> Any:
    request = vllm.GenerateRequest(request_id="gw-1", stream=is_stream)
    request.tokenized.input_ids.extend([5, 6, 7])
    request.sampling_params.CopyFrom(vllm.SamplingParams(**params))
    call: Any = served.channel.unary_stream(
        f"/{SERVICE_NAME}/Generate",
        request_serializer=vllm.GenerateRequest.SerializeToString,
        response_deserializer=vllm.GenerateResponse.FromString,
    )
    return call(request, timeout=TEST_TIMEOUT_S)


async def test_a_request_is_served_like_one_of_the_native_api(served: ServedFront) -> None:
    call = generate(served, max_tokens=4, temperature=0.0, n=1)
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key, num_cached_tokens=16)
    served.port.send(spec.key, [70, 71])
    served.port.finish(spec.key)

    answers = [answer async for answer in call]

    assert (spec.request_id, spec.max_tokens) == ("gw-1", 4)
    assert spec.prompt_ids.tolist() == [5, 6, 7]
    ids = [one for answer in answers for one in answer.chunk.token_ids]
    assert ids == [70, 71]
    assert answers[-1].complete.finish_reason == "length"
    assert answers[-1].complete.prompt_tokens == 3
    assert served.server.num_live_requests == 0


async def test_an_abort_ends_the_request_and_the_call(served: ServedFront) -> None:
    """The gateway keeps the call open after an abort, so the service must end it."""
    served.port.is_answering = True
    call = generate(served, max_tokens=100)
    (spec,) = await served.port.next_submission()
    served.port.admit(spec.key)
    served.port.send(spec.key, [70])
    assert list((await call.read()).chunk.token_ids) == [70]

    await ask(served, "Abort", vllm.AbortRequest(request_ids=["gw-1", "gone", "gw-1"]))

    assert (await served.port.next_cancel()) == ((spec.key,), FinishReason.CANCELLED)
    assert (await call.read()).complete.finish_reason == "abort"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is CODE.OK


async def test_a_disconnected_caller_cancels_the_request(served: ServedFront) -> None:
    call = generate(served, is_stream=False, max_tokens=100)
    (spec,) = await served.port.next_submission()

    call.cancel()

    keys, reason = await served.port.next_cancel()
    assert (keys, reason) == ((spec.key,), FinishReason.CANCELLED)


async def test_an_invalid_abort_is_rejected_by_its_field(served: ServedFront) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(served, "Abort", vllm.AbortRequest(request_ids=["fine", "é"]))

    assert rich_error(caught.value).fields == ["request_ids[1]"]


async def test_rejections_are_statuses_with_details(served: ServedFront) -> None:
    for params, code, field in (
        ({"top_p": 2.0}, CODE.INVALID_ARGUMENT, "sampling_params.top_p"),
        ({"stop": [""]}, CODE.INVALID_ARGUMENT, "sampling_params.stop[0]"),
        ({"max_tokens": 100_000}, CODE.INVALID_ARGUMENT, "sampling_params.max_tokens"),
        (
            {"logit_bias": {9999: 1.0}},
            CODE.INVALID_ARGUMENT,
            "sampling_params.logit_bias[9999].key",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served, **params).read()
        assert (caught.value.code(), rich_error(caught.value).fields) == (code, [field])

    call = generate(served, structural_tag="{}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is CODE.UNIMPLEMENTED
    assert rich_error(caught.value).info.metadata["feature"] == "structural_tag"

    call = generate(served)
    (spec,) = await served.port.next_submission()
    served.port.fail(spec.key, FailureReason.QUEUE_FULL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    assert rich_error(caught.value).retry_s is not None


async def test_a_constraint_the_executor_lacks_is_rejected_by_its_gateway_name(
    text: ModelText,
) -> None:
    async with serving(text, gateway=gateway, is_up=False) as served:
        features = frozenset(Feature) - {Feature.JSON_SCHEMA}
        served.port.info = ExecutorInfo(
            name="formless", vocab_size=600, block_size=16, num_blocks=64, max_seq_len=512,
            max_num_seqs=8, features=features,
        )  # fmt: skip
        served.port.come_up()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served, json_schema="{}").read()

    assert caught.value.code() is CODE.UNIMPLEMENTED
    assert rich_error(caught.value).info.metadata["field"] == "sampling_params.json_schema"


async def test_malformed_bytes_are_reported_as_such(served: ServedFront) -> None:
    call: Any = served.channel.unary_stream(f"/{SERVICE_NAME}/Generate")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff", timeout=TEST_TIMEOUT_S).read()

    assert caught.value.code() is CODE.INVALID_ARGUMENT


async def test_health_reports_the_state_of_the_service(served: ServedFront) -> None:
    """A gateway regards any response as healthy: only an error status prevents it from routing
    requests here.
    """
    assert (await ask(served, "HealthCheck")).healthy

    served.port.go_down()
    for method in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(served, method)
        assert caught.value.code() is CODE.UNAVAILABLE
    served.port.come_up(epoch=2)
    assert (await ask(served, "HealthCheck")).healthy

    served.server.front.begin_drain()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(served, "HealthCheck")
    assert rich_error(caught.value).info.reason == "DRAINING"


async def test_a_worker_reports_its_model_server_and_load(served: ServedFront) -> None:
    model = await ask(served, "GetModelInfo")
    assert (model.served_model_name, model.is_generation) == ("tiny", True)
    limits = served.server.front.current_limits()
    assert (model.max_context_length, model.vocab_size) == (512, limits.vocab_size)
    # Our path would reveal our file system to unauthenticated callers, and may be another model's
    # on their machine.
    assert model.tokenizer_path == "/nonexistent/penstock/tiny"
    assert not await asyncio.to_thread(Path(model.tokenizer_path).exists)

    server = await ask(served, "GetServerInfo")
    assert (server.server_type, server.data_parallel_size) == ("penstock", 1)
    assert (server.block_size, server.max_num_seqs) == (16, 8)

    answer = await ask(served, "GetLoads")
    (load,) = answer.loads
    assert (load.max_running_requests, load.max_total_num_tokens) == (8, 64 * 16)
    assert answer.timestamp.startswith("2027-01-15T08:00:00")
    assert (await ask(served, "GetLoads", vllm.GetLoadsRequest(dp_rank=0))).loads
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(served, "GetLoads", vllm.GetLoadsRequest(dp_rank=1))
    assert rich_error(caught.value).fields == ["dp_rank"]


async def test_the_tokenizer_is_sent_to_the_gateway(served: ServedFront) -> None:
    call: Any = served.channel.unary_stream(f"/{SERVICE_NAME}/GetTokenizer")
    for _ in range(2):  # the second is answered from the cache
        chunks = [
            common_pb2.GetTokenizerChunk.FromString(data)
            async for data in call(b"", timeout=TEST_TIMEOUT_S)
        ]

        data = b"".join(chunk.data for chunk in chunks)
        assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert "tokenizer.json" in archive.namelist()


async def test_a_method_that_is_not_supported_is_rejected_at_once(served: ServedFront) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        call: Any = served.channel.unary_stream(f"/{SERVICE_NAME}/SubscribeKvEvents")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"").read()
    assert caught.value.code() is CODE.UNIMPLEMENTED
    for method, feature in MISSING_METHODS.items():
        unary: Any = served.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(b"", timeout=TEST_TIMEOUT_S)
        assert caught.value.code() is CODE.UNIMPLEMENTED
        assert rich_error(caught.value).info.metadata["feature"] == feature


async def test_every_method_of_the_contract_answers_and_states_its_callers(
    served: ServedFront,
) -> None:
    (service,) = vllm.DESCRIPTOR.services_by_name.values()
    handlers: Any = served.server
    for method in service.methods:
        assert f"/{SERVICE_NAME}/{method.name}" in VllmEngineService.rights
        call: Any = served.channel.unary_stream(f"/{SERVICE_NAME}/{method.name}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff", timeout=TEST_TIMEOUT_S).read()
        # Not gRPC's own status of an unknown method, which has no details.
        assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata() or ())
    assert service.full_name == SERVICE_NAME
    assert handlers.health.is_serving


async def test_rights_are_checked_for_gateway_methods(text: ModelText, tmp_path: Path) -> None:
    security = SecurityFiles(tmp_path).tokens()
    async with serving(
        text, FrontConfig(acceptance_delay_s=0.0), gateway=gateway,
        security=security,
    ) as served:  # fmt: skip
        assert (await ask(served, "HealthCheck")).healthy  # a probe
        for method in ("Abort", "GetModelInfo", "GetLoads", "GetServerInfo"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(served, method)
            assert caught.value.code() is CODE.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served).read()
        assert caught.value.code() is CODE.UNAUTHENTICATED

        assert (await ask(served, "GetModelInfo", metadata=bearer_metadata(ACME))).is_generation
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(served, "GetLoads", metadata=bearer_metadata(ACME))
        assert caught.value.code() is CODE.PERMISSION_DENIED
        assert (await ask(served, "GetLoads", metadata=bearer_metadata(OPERATOR))).loads
