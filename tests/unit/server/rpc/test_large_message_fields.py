"""A message that is too large is rejected before it is parsed; its short fields are still read."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from penstock.server.front.errors import RequestError
from penstock.server.rpc import parsing
from penstock.server.rpc.parsing import parse, parse_request
from penstock.v1.generation_service_pb2 import (
    GenerateOnceRequest,
    GenerateRequest,
    MultiplexRequest,
    ResumeRequest,
)
from penstock.v1.model_service_pb2 import DetokenizeRequest, TokenizeRequest
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
    """Return (message, its GenerateRequest) with this prompt for each of the three types of request
    messages.
    """
    plain, once, multiplexed = GenerateRequest(), GenerateOnceRequest(), MultiplexRequest()
    multiplexed.submit.key = 7
    requests = (plain, once.generation, multiplexed.submit.generation)
    for request in requests:
        request.request_id = "r"
        request.stopping.max_tokens = 3
        request.chat_prompt.CopyFrom(prompt)
    return list(zip((plain, once, multiplexed), requests, strict=True))


@pytest.mark.parametrize(("path", "fields"), LARGE_PROMPTS.items(), ids=list(LARGE_PROMPTS))
def test_a_large_chat_prompt_is_rejected_unread(path: str, fields: dict[str, Any]) -> None:
    for message, request in in_each_message(ChatPrompt(**fields)):
        found, failure = parse_request(type(message), message.SerializeToString())

        assert failure is not None
        assert [violation.path for violation in failure.violations] == [path]
        request.ClearField("chat_prompt")
        assert found == message


def test_a_long_chat_of_few_parts_is_read() -> None:
    prompt = ChatPrompt()
    prompt.messages.add(role="user").parts.add(text="x" * (1 << 20))
    for message, _ in in_each_message(prompt):
        assert parse_request(type(message), message.SerializeToString()) == (message, None)


def test_the_empty_messages_of_a_long_chat_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, searched = parsing._spans, list[int]()

    def counted(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
        searched.append(end - position)
        return spans(data, position, end)

    monkeypatch.setattr(parsing, "_spans", counted)
    request = GenerateRequest()
    for _ in range(8000):
        request.chat_prompt.messages.add()
    request.chat_prompt.messages.add(role="user").parts.add(text="x" * (64 << 10))
    assert parse_request(GenerateRequest, request.SerializeToString()) == (request, None)
    # The request, its prompt, the one message with content and its part.
    assert len(searched) == 4


FULL_REQUESTS: dict[str, dict[str, Any]] = {
    "constraint.choice.choices": {"constraint": {"choice": {"choices": [""] * 70_000}}},
    "stopping.stop_strings": {"stopping": {"stop_strings": [""] * 70_000}},
    "stopping.stop_token_ids": {"stopping": {"stop_token_ids": [1] * ((1 << 20) + 1)}},
    "sampling.logit_bias": {"sampling": {"logit_bias": [{}] * 70_000}},
    "token_prompt.ids": {"token_prompt": {"ids": [1] * ((1 << 20) + 1)}},
}


@pytest.mark.parametrize(("path", "fields"), FULL_REQUESTS.items(), ids=list(FULL_REQUESTS))
def test_a_request_of_too_many_fields_is_rejected_unread(path: str, fields: dict[str, Any]) -> None:
    message = MultiplexRequest()
    message.submit.key = 7
    message.submit.generation.CopyFrom(GenerateRequest(request_id="r", **fields))

    found, failure = parse_request(MultiplexRequest, message.SerializeToString())

    assert failure is not None
    assert [violation.path for violation in failure.violations] == [path]
    assert (found.submit.key, found.submit.generation.request_id) == (7, "r")
    assert found.ByteSize() < 64


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (
            TokenizeRequest(chat_prompt=ChatPrompt(**LARGE_PROMPTS["chat_prompt.messages"])),
            "chat_prompt.messages",
        ),
        (DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1)), "token_ids"),
        (ResumeRequest(received_token_counts=[1] * ((1 << 20) + 1)), "received_token_counts"),
    ],
    ids=["tokenize", "detokenize", "resume"],
)
def test_any_message_of_too_many_fields_is_rejected_by_its_path(
    message: Message, path: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(type(message), message.SerializeToString())
    assert [violation.path for violation in caught.value.failure.violations] == [path]


def test_a_truncated_message_with_too_many_fields_is_rejected() -> None:
    message = GenerateRequest()
    message.stopping.stop_strings.extend([""] * 70_000)
    with pytest.raises(RequestError) as caught:
        parse_request(GenerateRequest, message.SerializeToString() + b"\x1f")
    assert [one.path for one in caught.value.failure.violations] == ["stopping.stop_strings"]


def test_a_long_prompt_of_token_ids_is_read() -> None:
    message = GenerateRequest()
    message.token_prompt.ids.extend([70_000] * 200_000)
    assert parse_request(GenerateRequest, message.SerializeToString()) == (message, None)
