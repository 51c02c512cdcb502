"""Chat messages given as dicts have the same content as ChatMessage values; errors name
the wrong key.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest

import penstock.v1 as pb
from penstock.client import ChatMessage, ChatPrompt, Image, ToolCall
from penstock.client.encoding import encode_request
from penstock.client.options import build_request

PNG = Image(data=b"\x89PNG", mime_type="image/png")
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG.data).decode()}"
CALL = ToolCall("add", {"a": 1, "b": None}, id="c1")


def encode(*messages: Any) -> pb.GenerateRequest:
    return encode_request(build_request(messages, {}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "user", "content": "Hi"}, ChatMessage("user", "Hi")),
        ({"role": "user", "content": "Hi", "name": None}, ChatMessage("user", "Hi")),
        (
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
            ChatMessage("tool", "3", name="add", tool_call_id="c1"),
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is"},
                    {"type": "image_url", "image_url": {"url": PNG_URL}},
                    "or",
                    PNG,
                ],
            },
            ChatMessage("user", ("What is", PNG, "or", PNG)),
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1, "b": null}'},
                    },
                    CALL,
                    {"id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": None}}},
                ],
            },
            ChatMessage("assistant", tool_calls=(CALL, CALL, CALL)),
        ),
    ],
)
def test_a_dict_is_read_as_the_message_it_describes(
    given: dict[str, Any], message: ChatMessage
) -> None:
    assert encode(given) == encode(message)
    assert encode(message, given) == encode(message, message)
    assert encode_request(build_request(ChatPrompt(messages=[given]), {})) == encode(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "user", "contnet": "x"}, ".contnet: no such key; did you mean content?"),
        ({"role": "user", "zzz": "x"}, ".zzz: no such key; known are role, content, name,"),
        ({"content": "secret"}, ".role: missing"),
        ({"role": 1, "content": "secret"}, ".role: must be a str, not int"),
        ({"role": "user", "content": {"secret": 1}}, ".content: must be a str or a list, not dict"),
        ({"role": "user", "content": 7}, ".content: must be a str or a list, not int"),
        ({"role": "user", "content": [7]}, ".content[0]: must be a dict, not int"),
        (
            {"role": "user", "content": ["a", {"type": "audio"}]},
            ".content[1].type: must be 'text' or 'image_url'",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            ".content[0].text: missing",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": PNG_URL}]},
            ".content[0].image_url: must be a dict, not str",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            ".content[0].image_url.url: must be 'data:image/TYPE;base64,DATA'",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,secret!"}}
                ],
            },
            ".content[0].image_url.url: the data is not base64",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ".tool_calls[0].function.arguments: not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            ".tool_calls[0].function.arguments: must be a dict, not list",
        ),
    ],
)
def test_a_bad_dict_is_named_by_its_path_and_not_repeated(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        encode({"role": "user", "content": "Hi"}, given)

    assert str(caught.value).startswith(f"chat_prompt.messages[1]{message}")
    assert "secret" not in str(caught.value)


def test_a_single_message_is_rejected_as_a_prompt() -> None:
    message: Any = {"role": "user", "content": "Hi"}

    with pytest.raises(TypeError, match=r"^prompt: must be a sequence of messages, not one"):
        build_request(message, {})
