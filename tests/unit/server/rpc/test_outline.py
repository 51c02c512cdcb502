"""A chat prompt that is too large is refused before it is read; the rest of its message is kept."""

from typing import Any

import pytest
from google.protobuf.message import Message

from penstock.server.rpc.parsing import parse_request
from penstock.v1.generation_service_pb2 import (
    GenerateOnceRequest,
    GenerateRequest,
    MultiplexRequest,
)
from penstock.v1.prompt_pb2 import ChatPrompt

LARGE = {"a": [1] * 20_000}
LARGE_PROMPTS: dict[str, dict[str, Any]] = {
    "chat_prompt.tools": {"tools": [LARGE]},
    "chat_prompt.template_arguments": {"template_arguments": LARGE},
    "chat_prompt.messages.tool_calls": {
        "messages": [{"role": "assistant", "tool_calls": [{"name": "x", "arguments": LARGE}]}]
    },
    "chat_prompt.messages.parts": {
        "messages": [{"role": "user", "parts": [{"text": "x" * 32}] * 5000}]
    },
    "chat_prompt.messages": {"messages": [{}] * 70_000},
}


def in_each_message(prompt: ChatPrompt) -> list[tuple[Message, GenerateRequest]]:
    """Messages with this prompt, each with its part that is a GenerateRequest."""
    plain, once, multiplexed = GenerateRequest(), GenerateOnceRequest(), MultiplexRequest()
    multiplexed.submit.key = 7
    requests = (plain, once.generation, multiplexed.submit.generation)
    for request in requests:
        request.request_id = "r"
        request.stopping.max_tokens = 3
        request.chat_prompt.CopyFrom(prompt)
    return list(zip((plain, once, multiplexed), requests, strict=True))


@pytest.mark.parametrize(("path", "fields"), LARGE_PROMPTS.items(), ids=list(LARGE_PROMPTS))
def test_a_large_chat_prompt_is_refused_unread(path: str, fields: dict[str, Any]) -> None:
    for message, request in in_each_message(ChatPrompt(**fields)):
        found, refusal = parse_request(type(message), message.SerializeToString())

        assert refusal is not None
        assert [violation.path for violation in refusal.violations] == [path]
        request.ClearField("chat_prompt")
        assert found == message


def test_a_long_chat_of_few_parts_is_read() -> None:
    prompt = ChatPrompt()
    prompt.messages.add(role="user").parts.add(text="x" * (1 << 20))
    for message, _ in in_each_message(prompt):
        assert parse_request(type(message), message.SerializeToString()) == (message, None)
