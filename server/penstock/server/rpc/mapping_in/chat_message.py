"""Chat messages, and the other data of the chat template.

Owns the reading of parts, tool calls, tools and template arguments, and of google.protobuf.Struct.
Whether the template supports them is checked where it is rendered.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.struct_pb2 import Struct, Value

from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.text.chat_template import ChatMessage, JsonValue, TemplateData, ToolCall
from penstock.server.text.token_bound import num_utf8_bytes
from penstock.v1 import prompt_pb2 as pb

REFUSED_FIELDS: Final[Mapping[str, str]] = {"chat_prompt.messages.parts.image": "images"}
"""Path in GenerateRequest -> feature, as reported in ErrorInfo.metadata."""
_MAX_NAME_CHARS: Final = 64
_MAX_CALL_ID_CHARS: Final = 128
_MAX_TOOLS: Final = 128
_MAX_EXACT: Final = 2**53


def read_message(message: pb.ChatMessage, path: str, violations: Violations) -> ChatMessage:
    """One message; its text parts are joined."""
    violations.text_length(f"{path}.role", message.role, 1, _MAX_NAME_CHARS)
    if message.HasField("name"):
        violations.text_length(f"{path}.name", message.name, 1, _MAX_NAME_CHARS)
    if message.HasField("tool_call_id"):
        violations.text_length(f"{path}.tool_call_id", message.tool_call_id, 1, _MAX_CALL_ID_CHARS)
    texts: list[str] = []
    for index, part in enumerate(message.parts):
        match part.WhichOneof("content"):
            case "text":
                texts.append(part.text)
            case "image":
                violations.require_feature(
                    "images", f"{path}.parts[{index}].image", is_supported=False
                )
            case _:
                violations.add(f"{path}.parts[{index}]", "one of text and image is required")
    calls: list[ToolCall] = []
    if violations.count(f"{path}.tool_calls", len(message.tool_calls), _MAX_TOOLS):
        calls = [
            _tool_call(call, f"{path}.tool_calls[{index}]", violations)
            for index, call in enumerate(message.tool_calls)
        ]
    return ChatMessage(
        role=message.role,
        content="".join(texts),
        name=message.name,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id,
    )


def read_template_data(
    prompt: pb.ChatPrompt, messages: Sequence[ChatMessage], violations: Violations
) -> TemplateData:
    """Tools and template arguments, and their size together with the tool calls of `messages`."""
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    path = "chat_prompt.tools"
    if violations.count(path, len(prompt.tools), _MAX_TOOLS):
        tools = tuple(
            _plain(tool, f"{path}[{index}]", violations) for index, tool in enumerate(prompt.tools)
        )
    arguments = _plain(prompt.template_arguments, "chat_prompt.template_arguments", violations)
    calls = [
        (call.id, call.name, call.arguments) for message in messages for call in message.tool_calls
    ]
    data = [each for each in (tools, arguments, calls) if each]
    num_bytes = sum(num_utf8_bytes(json.dumps(each, ensure_ascii=False)) for each in data)
    return TemplateData(tools=tools, arguments=arguments, num_bytes=num_bytes)


def _tool_call(call: pb.ToolCall, path: str, violations: Violations) -> ToolCall:
    violations.text_length(f"{path}.id", call.id, 0, _MAX_CALL_ID_CHARS)
    violations.text_length(f"{path}.name", call.name, 1, _MAX_NAME_CHARS)
    arguments = _plain(call.arguments, f"{path}.arguments", violations)
    return ToolCall(id=call.id, name=call.name, arguments=arguments)


def _plain(struct: Struct, path: str, violations: Violations) -> Mapping[str, JsonValue]:
    """Plain values; no deeper than protobuf allows. Records values that JSON does not have."""
    try:
        return {name: _plain_value(value) for name, value in struct.fields.items()}
    except ValueError:
        violations.add(path, "contains a number that is not finite, or an unset value")
        return {}


def _plain_value(value: Value) -> JsonValue:
    match value.WhichOneof("kind"):
        case "null_value":
            return None
        case "bool_value":
            return value.bool_value
        case "string_value":
            return value.string_value
        case "number_value":
            return _number(value.number_value)
        case "list_value":
            return [_plain_value(inner) for inner in value.list_value.values]
        case "struct_value":
            fields = value.struct_value.fields
            return {name: _plain_value(inner) for name, inner in fields.items()}
        case _:
            raise ValueError("no value")


def _number(value: float) -> int | float:
    """A whole number becomes an integer, as in JSON: templates print it."""
    if not math.isfinite(value):
        raise ValueError("not finite")
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT else value
