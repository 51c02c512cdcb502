"""Requests that are rejected, and the statuses of the rejections, over a real socket."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from penstock.scheduler.quotas import TenantQuota
from penstock.server.front.prompt_tokens import TextQuotas
from penstock.server.rpc import model_service
from penstock.server.rpc.mapping_in import prompt
from penstock.server.rpc.mapping_in.prompt import UNSUPPORTED_FIELDS
from penstock.server.rpc.model_service import UNIMPLEMENTED_METHODS
from penstock.server.rpc.service_names import MODEL, method_name
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc, prompt_pb2
from penstock.v1.prompt_pb2 import ContentPart, ImagePart
from support.fronts import ServedFront, rich_error, serving
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S
from support.tiny_tokenizers import write_model_folder

GENERATE = "/penstock.v1.GenerationService/Generate"


async def stream_bytes(
    served: ServedFront, data: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> list[bytes]:
    call = cast("Any", served.channel.unary_stream(GENERATE))(data, metadata=metadata)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        return [response async for response in call]


async def rejection(served: ServedFront, message: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream_bytes(served, message.SerializeToString())
    return caught.value


async def test_unknown_fields_are_ignored_and_counted(served: ServedFront) -> None:
    message = text_request()
    data = message.SerializeToString() + b"\xfa\x7f\x03abc"
    call = asyncio.ensure_future(stream_bytes(served, data))
    (spec,) = await served.port.next_submission()
    served.port.finish(spec.key)
    await call
    assert served.server.front.counters.num_unknown_fields == 1


async def test_thousands_of_violations_fit_the_trailers(served: ServedFront) -> None:
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend([10**6] * 500)
    error = rich_error(await rejection(served, message))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields[0] == "token_prompt.ids[0]"
    assert len(error.fields) == 16
    assert error.info.metadata["num_more_violations"] == "484"
    assert len(error.message.encode()) <= 1024


async def test_prompt_text_is_never_in_an_error(served: ServedFront) -> None:
    for edit in (
        lambda m: m.stopping.stop_strings.append("canary" * 40),
        lambda m: setattr(m.cache, "salt", "canary" * 40),
        lambda m: setattr(m, "request_id", "canary\n"),
    ):
        message = text_request("canary")
        edit(message)
        error = await rejection(served, message)
        trailers = dict(error.trailing_metadata() or ())
        assert "canary" not in (error.details() or "")
        status = trailers["grpc-status-details-bin"]
        assert isinstance(status, bytes)
        assert b"canary" not in status


@pytest.mark.parametrize("request_id", ["mine", "m" * 129, "mine\n", None])
async def test_every_rejection_of_a_request_has_its_id(
    served: ServedFront, request_id: str | None
) -> None:
    """The error contains the client's request id if that is valid, otherwise one that the server
    generated.
    """
    limited = served.server.front.prompts.quotas = TextQuotas(
        lambda _: TenantQuota(max_requests_per_minute=1)
    )
    limited.charge("", 1)
    fitting = text_request(request_id=request_id)
    for message in (
        pb.GenerateRequest(request_id=request_id),  # no prompt
        pb.GenerateRequest(request_id=request_id, model="other"),
        fitting,  # beyond its tenant's quota
    ):
        _check_id(rich_error(await rejection(served, message)).request_id, request_id)
        once = pb.GenerateOnceRequest(generation=message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GenerateOnce(once, timeout=TEST_TIMEOUT_S)
        _check_id(rich_error(caught.value).request_id, request_id)
    served.port.go_down()
    _check_id(rich_error(await rejection(served, fitting)).request_id, request_id)


def _check_id(reported: str, request_id: str | None) -> None:
    if request_id == "mine":
        assert reported == "mine"
    else:
        assert uuid.UUID(reported).version == 4


IMAGE = ContentPart(image=ImagePart(data=b"x", mime_type="image/png"))
SET_FIELD: dict[str, Callable[[pb.GenerateRequest], object]] = {
    "chat_prompt.messages.parts.image": lambda m: m.MergeFrom(
        pb.GenerateRequest(
            chat_prompt=prompt_pb2.ChatPrompt(
                messages=[prompt_pb2.ChatMessage(role="user", parts=[IMAGE])]
            )
        )
    ),
}


@pytest.mark.parametrize("path", sorted(UNSUPPORTED_FIELDS))
async def test_unsupported_fields_are_unimplemented_by_name(served: ServedFront, path: str) -> None:
    message = text_request()
    SET_FIELD[path](message)
    error = rich_error(await rejection(served, message))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.info.reason == "FEATURE_UNSUPPORTED"
    assert error.info.metadata["feature"] == UNSUPPORTED_FIELDS[path]
    indexed = path.replace("messages", "messages[0]").replace("parts", "parts[0]")
    assert error.info.metadata["field"] == indexed


async def test_tool_calls_without_a_template_for_them_are_rejected_by_their_path(
    tmp_path: Path,
) -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    folder = write_model_folder(tmp_path / "tiny", settings={"chat_template": source})
    text = ModelText.load(folder, name="tiny")
    call = prompt_pb2.ToolCall(id="1", name="now")
    message = pb.GenerateRequest(
        chat_prompt=prompt_pb2.ChatPrompt(
            messages=[
                prompt_pb2.ChatMessage(role="user", parts=[ContentPart(text="x")]),
                prompt_pb2.ChatMessage(role="assistant", tool_calls=[call]),
            ]
        )
    )
    async with serving(text) as served:
        error = rich_error(await rejection(served, message))
    text.close()
    assert error.info.metadata["feature"] == "tools"
    assert error.info.metadata["field"] == "chat_prompt.messages[1].tool_calls"


@pytest.mark.parametrize("method", sorted(UNIMPLEMENTED_METHODS))
async def test_unsupported_methods_are_unimplemented_by_name(
    served: ServedFront, method: str
) -> None:
    call: Any = served.channel.unary_unary(f"/{method_name(MODEL, method)}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call(b""), TEST_TIMEOUT_S)
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.info.metadata["feature"] == UNIMPLEMENTED_METHODS[method]


def test_features_reported_and_rejected_have_the_same_names() -> None:
    published = {field.name for field in model_pb2.ModelFeatures.DESCRIPTOR.fields}
    assert set(UNIMPLEMENTED_METHODS.values()) <= published
    assert set(UNSUPPORTED_FIELDS.values()) <= published


async def test_a_unary_response_is_not_split_into_chunks(served: ServedFront) -> None:
    message = text_request(request_id="mine")
    message.output.min_chunk_tokens = 1
    message.output.max_chunk_delay.FromMilliseconds(5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.GenerateOnce(pb.GenerateOnceRequest(generation=message))
    error = rich_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.fields == ["output.min_chunk_tokens", "output.max_chunk_delay"]
    assert error.request_id == "mine"


async def test_a_long_list_of_ids_is_read_and_its_text_encoded_on_a_thread(
    served: ServedFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(task: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return task(*args)

        return run

    for module, name in ((prompt, "token_array"), (model_service, "_text_as_bytes")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    models = model_service_pb2_grpc.ModelServiceStub(served.channel)
    for at_once in (1000, 100):
        monkeypatch.setattr(prompt, "IDS_AT_ONCE", at_once)
        monkeypatch.setattr(model_service, "_TOKENS_AT_ONCE", at_once)
        request = model_service_pb2.DetokenizeRequest(token_ids=[72] * 200)
        assert (await models.Detokenize(request)).text == "e" * 200
    assert ["tokenizer" in name for name in threads] == [False, False, True, True]


async def test_model_service_answers_and_rejects(served: ServedFront) -> None:
    models = model_service_pb2_grpc.ModelServiceStub(served.channel)
    (model,) = (await models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.name == "tiny"
    assert model.state == model_pb2.MODEL_STATE_READY
    assert model.limits.max_total_tokens == 512
    assert model.limits.max_prompt_tokens == 511
    assert model.limits.max_output_tokens == 511
    assert model.features.chat_prompt
    assert not model.features.images
    assert model.features.multiplex
    assert model.features.chunk_limits
    assert model.limits.max_chunk_tokens == 256
    assert model.executor == "scripted"

    tokens = await models.Tokenize(tokenize_request("héllo"))
    back = await models.Detokenize(model_service_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == "héllo"
    chat = model_service_pb2.TokenizeRequest()
    chat.chat_prompt.messages.add(role="user", parts=[ContentPart(text="hi")])
    rendered = await models.Tokenize(chat)
    assert "user\nhi" in rendered.rendered_text
    assert rendered.token_ids

    bad: list[tuple[Any, Any, list[str]]] = [
        (models.Tokenize, model_service_pb2.TokenizeRequest(), ["prompt"]),
        (models.Tokenize, tokenize_request(""), ["text_prompt.text"]),
        (
            models.Detokenize,
            model_service_pb2.DetokenizeRequest(token_ids=[1, 10**6]),
            ["token_ids[1]"],
        ),
        (models.ListModels, model_service_pb2.ListModelsRequest(page_size=0), ["page_size"]),
        (models.ListModels, model_service_pb2.ListModelsRequest(page_token="x"), ["page_token"]),
    ]
    for method, message, fields in bad:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(message)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == fields
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await models.GetModel(model_service_pb2.GetModelRequest(name="other"))
    assert rich_error(caught.value).info.reason == "MODEL_NOT_FOUND"


def tokenize_request(text: str) -> model_service_pb2.TokenizeRequest:
    message = model_service_pb2.TokenizeRequest()
    message.text_prompt.text = text
    return message
