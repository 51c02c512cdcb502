"""Tokenisation and chat rendering with the included model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.executor.models import resolve_model
from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.model_text import ModelText
from support.tiny_tokenizers import encode_chat

SPEECH = "ROMEO:\nBut soft! What light through yonder window breaks?\n"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModelText]:
    model = ModelText.load(resolve_model("demo"))
    yield model
    model.close()


def test_text_begins_with_the_beginning_and_is_returned(demo: ModelText) -> None:
    ids = demo.tokenizer.encode(SPEECH).tolist()
    assert ids[0] == demo.files.bos_id
    stream = demo.new_stream()
    text = "".join(stream.push([token_id]).text for token_id in ids)
    assert text + stream.finish().text == SPEECH
    assert demo.detokenizer.token_bytes(0) is not None
    assert len(ids) >= demo.tokenizer.min_num_tokens(len(SPEECH)) > 0


def test_conversations_are_rendered(demo: ModelText) -> None:
    messages = [
        ChatMessage(role="user", content="What news?"),
        ChatMessage(role="assistant", content="None, my lord."),
        ChatMessage(role="user", content=f"Then {demo.files.eos_token}go."),
    ]
    chat = encode_chat(demo.tokenizer, messages)
    ids = chat.ids.tolist()
    assert ids[0] == demo.files.bos_id
    assert ids.count(demo.files.bos_id) == 1
    # One end after the answer; the one in the question is only text.
    assert sum(ids.count(eos_id) for eos_id in demo.files.eos_ids) == 1
    assert f"Then {demo.files.eos_token}go." in chat.text
