"""A tokenizer and a model have different vocabulary sizes: the service rejects only prompts with
tokens that the model lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest

from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2, model_service_pb2_grpc
from penstock.v1.prompt_pb2 import ContentPart
from support import tiny_tokenizers
from support.fronts import INFO, ServedFront, rich_error, serving
from support.timeout import TEST_TIMEOUT_S

TEXT = "The quality of mercy, 日本語テキスト"
FAMILIES = {"byte level": tiny_tokenizers.byte_level, "fallback": tiny_tokenizers.byte_fallback}


class Harness:
    """Models with the same tokenizer and a vocabulary size that the test sets."""

    def __init__(self, family: str, folder: Path) -> None:
        self._family, self._folder = family, folder

    def text(self, vocab_size: int | None = None) -> ModelText:
        tokenizer = FAMILIES[self._family]()
        size = vocab_size or tokenizer.get_vocab_size()
        folder = tiny_tokenizers.write_model_folder(
            self._folder, tokenizer, config={"vocab_size": size}
        )
        return ModelText.load(folder, name="tiny")

    async def highest_id(self, *, is_chat: bool) -> int:
        with contextlib.closing(self.text()) as text:
            if is_chat:
                chat = await text.tokenizer.encode_chat_async(
                    [ChatMessage(role="user", content=TEXT)]
                )
                return int(chat.ids.max())
            return int(text.tokenizer.encode(TEXT).max())

    @contextlib.asynccontextmanager
    async def serving(self, vocab_size: int) -> AsyncGenerator[ServedFront]:
        with contextlib.closing(self.text(vocab_size)) as text:
            async with serving(text) as served:
                yield served


@pytest.fixture(params=FAMILIES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    return Harness(request.param, tmp_path / "tiny")


def asked(*, is_chat: bool = False) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    if is_chat:
        message.chat_prompt.messages.add(role="user", parts=[ContentPart(text=TEXT)])
    else:
        message.text_prompt.text = TEXT
    return message


async def collected(served: ServedFront, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        call = served.stub.Generate(message)
        return [response async for response in cast("AsyncIterator[pb.GenerateResponse]", call)]


@pytest.mark.parametrize(
    ("is_chat", "path"), [(False, "text_prompt.text"), (True, "chat_prompt.messages")]
)
@pytest.mark.parametrize("share", [1.0, 0.5])
async def test_a_prompt_that_the_model_cannot_take_is_rejected_by_its_field(
    harness: Harness, is_chat: bool, path: str, share: float
) -> None:
    vocab_size = int(await harness.highest_id(is_chat=is_chat) * share)
    async with harness.serving(vocab_size) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collected(served, asked(is_chat=is_chat))
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == [path]

        stub = model_service_pb2_grpc.ModelServiceStub(served.channel)
        request = model_service_pb2.TokenizeRequest()
        if is_chat:
            request.chat_prompt.messages.add(role="user", parts=[ContentPart(text=TEXT)])
        else:
            request.text_prompt.text = TEXT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(request, timeout=TEST_TIMEOUT_S)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == [path]


async def test_a_prompt_of_tokens_that_the_model_has_is_served(harness: Harness) -> None:
    async with harness.serving(await harness.highest_id(is_chat=False) + 1) as served:
        call = asyncio.ensure_future(collected(served, asked()))
        (spec,) = await served.port.next_submission()
        served.port.admit(spec.key)
        served.port.finish(spec.key)
        assert (await call)[-1].HasField("finished")


async def test_an_engine_with_more_tokens_than_the_tokenizer_ends_no_stream(
    harness: Harness,
) -> None:
    """Sampled tokens that the tokenizer lacks have no text."""
    async with harness.serving(await harness.highest_id(is_chat=False) + 1) as served:
        call = asyncio.ensure_future(collected(served, asked()))
        (spec,) = await served.port.next_submission()
        served.port.admit(spec.key)
        served.port.send(spec.key, [INFO.vocab_size - 1])
        served.port.finish(spec.key)
        assert (await call)[-1].HasField("finished")


async def test_the_disagreement_is_logged_in_one_line(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    vocab_size = await harness.highest_id(is_chat=False) // 2
    with caplog.at_level(logging.WARNING, "penstock"):
        async with harness.serving(vocab_size):
            pass
    (record,) = [item for item in caplog.records if "tokenizer" in item.getMessage()]
    assert f"the model {vocab_size}:" in record.getMessage()
