"""Escapes control tokens in everything that a client sends for a chat template.

Owns the walk over messages, tool calls, tools and template arguments; `control_tokens.py` does the
escaping.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.server.text.chat_template import ChatMessage, JsonValue, TemplateData, ToolCall
from penstock.server.text.control_tokens import MARK, ControlTokens
from penstock.server.text.errors import ControlTokenError

_ASSISTANT: Final = "assistant"


def guarded_chat(
    messages: Sequence[ChatMessage], data: TemplateData, controls: ControlTokens
) -> tuple[list[ChatMessage], TemplateData, bool]:
    """The same with control tokens escaped, and whether there were any. Raises
    ControlTokenError.
    """
    guarded = [_guarded_message(message, controls) for message in messages]
    guarded_data = data
    if data.tools or data.arguments:
        guarded_data = replace(
            data,
            tools=tuple(_guarded_object(tool, controls.guard) for tool in data.tools),
            arguments=_guarded_object(data.arguments, controls.guard),
        )
    is_guarded = guarded != list(messages) or guarded_data != data
    if is_guarded and _has_mark(messages, data):
        raise ControlTokenError("the conversation contains U+FDD0 next to a control token")
    return guarded, guarded_data, is_guarded


def _guarded_message(message: ChatMessage, controls: ControlTokens) -> ChatMessage:
    guard = controls.guard
    return ChatMessage(
        role=guard(message.role),
        content=controls.guard(message.content, is_models_own=message.role == _ASSISTANT),
        name=guard(message.name) if message.name else "",
        tool_calls=tuple(
            ToolCall(
                id=guard(call.id),
                name=guard(call.name),
                arguments=_guarded_object(call.arguments, guard),
            )
            for call in message.tool_calls
        ),
        tool_call_id=guard(message.tool_call_id) if message.tool_call_id else "",
    )


def _guarded_object(
    value: Mapping[str, JsonValue], guard: Callable[[str], str]
) -> Mapping[str, JsonValue]:
    return {guard(key): _guarded_value(inner, guard) for key, inner in value.items()}


def _guarded_value(value: JsonValue, guard: Callable[[str], str]) -> JsonValue:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return _guarded_object(value, guard)
    if isinstance(value, Sequence):
        return [_guarded_value(inner, guard) for inner in value]
    return value


def _has_mark(messages: Sequence[ChatMessage], data: TemplateData) -> bool:
    """Whether a text contains the character that escapes control tokens."""
    found = False

    def check(text: str) -> str:
        nonlocal found
        found = found or MARK in text
        return text

    for message in messages:
        check(message.role + message.content + message.name + message.tool_call_id)
        for call in message.tool_calls:
            check(call.id + call.name)
            _guarded_object(call.arguments, check)
    for each in (*data.tools, data.arguments):
        _guarded_object(each, check)
    return found
