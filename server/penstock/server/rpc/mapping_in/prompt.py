"""Reads the prompt of a request: text, token ids or a chat.

A chat has messages (with parts and tool calls), tools and template arguments. Whether the chat
template supports them is checked when it is rendered.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from google.protobuf.struct_pb2 import Struct, Value
from numpy.typing import NDArray

from penstock.server.front.generation import ChatInput, LongTokenInput, TextInput, TokenInput
from penstock.server.front.limits import Limits
from penstock.server.front.prompt_tokens import WINDOW_PATH
from penstock.server.front.submission import prompt_too_long
from penstock.server.rpc.mapping_in.violations import MAX_KEPT, Violations
from penstock.server.rpc.parsing import MAX_PARTS
from penstock.server.text.chat_template import (
    NO_DATA,
    ChatMessage,
    JsonValue,
    TemplateData,
    ToolCall,
)
from penstock.server.text.token_bound import num_utf8_bytes
from penstock.v1 import prompt_pb2 as pb
from penstock.v1.prompt_pb2 import ChatPrompt, TextPrompt

_NO_IDS: Final = TokenInput(ids=())
TEXT_PATH = "text_prompt.text"
TOKENS_PATH = "token_prompt.ids"
CHAT_PATH = "chat_prompt.messages"
UNSUPPORTED_FIELDS: Final[Mapping[str, str]] = {"chat_prompt.messages.parts.image": "images"}
"""Fields that are always rejected: path in GenerateRequest -> feature that the error names."""
_MAX_NAME_CHARS: Final = 64
_MAX_CALL_ID_CHARS: Final = 128
_MAX_TOOLS: Final = 128
_MAX_VALUES: Final = 8192
"""Maximum number of values in tools, tool calls and template arguments. Reading one blocks the
event loop for up to 1.2 us."""
_MAX_EXACT: Final = 2**53
_FEW_IDS: Final = 32
IDS_AT_ONCE: Final = 4096
"""Number of token ids that are converted at a time, in about a fifth of a millisecond. A prompt
with more ids is converted on a thread."""


def read_text(prompt: TextPrompt, limits: Limits, violations: Violations) -> TextInput:
    """Return a plain text prompt. Records a violation if it is empty or has too many bytes."""
    text = prompt.text
    if not text:
        violations.add(TEXT_PATH, "must not be empty")
    _check_bytes(TEXT_PATH, num_utf8_bytes(text), limits, violations)
    return TextInput(
        text=text,
        add_special_tokens=(
            prompt.add_special_tokens if prompt.HasField("add_special_tokens") else True
        ),
    )


def read_token_ids(
    ids: Sequence[int], path: str, limits: Limits, violations: Violations
) -> TokenInput | LongTokenInput:
    """Return token ids, converted by `token_input`. If there are none, or more than the context
    length, records a violation and returns no ids."""
    if not ids:
        violations.add(path, "must not be empty")
        return _NO_IDS
    if len(ids) > limits.max_context_tokens:
        violations.prompt_too_long(prompt_too_long(path, len(ids), limits).failure)
        return _NO_IDS
    return token_input(ids, path, limits, violations)


def token_input(
    ids: Sequence[int], path: str, limits: Limits, violations: Violations
) -> TokenInput | LongTokenInput:
    """Return token ids as a prompt. Records a violation for each id outside the vocabulary.

    If there are more than IDS_AT_ONCE ids, returns a `LongTokenInput`: its ids are converted and
    checked later.
    """
    if len(ids) > IDS_AT_ONCE:
        convert = functools.partial(_long_ids, ids, path, limits)
        return LongTokenInput(num_tokens=len(ids), convert=convert)
    if len(ids) <= _FEW_IDS and max(values := ids[:], default=0) < limits.vocab_size:
        return TokenInput(ids=np.array(values, dtype=np.int32))
    found = token_array(ids)
    check_token_ids(found, path, limits, violations)
    return TokenInput(ids=found.astype(np.int32))


def check_token_ids(
    ids: NDArray[np.int64], path: str, limits: Limits, violations: Violations
) -> None:
    """Record a violation for each id outside the vocabulary, for at most MAX_KEPT ids."""
    if not len(ids) or ids.max() < limits.vocab_size:
        return
    for index in np.flatnonzero(ids >= limits.vocab_size)[:MAX_KEPT].tolist():
        violations.add(f"{path}[{index}]", f"must be below {limits.vocab_size}, not {ids[index]}")


def read_chat(prompt: ChatPrompt, limits: Limits, violations: Violations) -> ChatInput:
    """Return a chat prompt. If it has too many messages or parts, records a violation and returns
    it without messages. The limits of the rendered text are checked when the template is applied.
    """
    messages: list[ChatMessage] = []
    data = NO_DATA
    if not prompt.messages:
        violations.add(CHAT_PATH, "must not be empty")
    is_readable = violations.count(
        CHAT_PATH, len(prompt.messages), limits.config.max_chat_messages
    ) and violations.count(
        "chat_prompt.messages.parts",
        sum(len(message.parts) for message in prompt.messages),
        MAX_PARTS,
    )
    if is_readable:
        values = _Values()
        for index, message in enumerate(prompt.messages):
            messages.append(_read_message(message, f"{CHAT_PATH}[{index}]", violations, values))
        data = _read_template_data(prompt, messages, violations, values)
    num_bytes = sum(num_utf8_bytes(message.text) for message in messages) + data.num_bytes
    _check_bytes(CHAT_PATH, num_bytes, limits, violations)
    return ChatInput(
        messages=tuple(messages),
        add_generation_prompt=(
            prompt.add_generation_prompt if prompt.HasField("add_generation_prompt") else True
        ),
        window_tokens=(
            violations.integer(WINDOW_PATH, prompt.window_tokens, 1, limits.max_prompt_tokens)
            if prompt.HasField("window_tokens")
            else None
        ),
        data=data,
    )


def _check_bytes(path: str, num_bytes: int, limits: Limits, violations: Violations) -> None:
    max_bytes = limits.config.max_prompt_bytes
    if num_bytes > max_bytes:
        violations.add(path, f"has {num_bytes} bytes of UTF-8, at most {max_bytes} are allowed")


def _read_message(
    message: pb.ChatMessage, path: str, violations: Violations, values: "_Values"
) -> ChatMessage:
    """Return one message, with its text parts joined."""
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
            _tool_call(call, f"{path}.tool_calls[{index}]", violations, values)
            for index, call in enumerate(message.tool_calls)
        ]
    return ChatMessage(
        role=message.role,
        content="".join(texts),
        name=message.name,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id,
    )


def _read_template_data(
    prompt: pb.ChatPrompt,
    messages: Sequence[ChatMessage],
    violations: Violations,
    values: "_Values",
) -> TemplateData:
    """Return the tools and template arguments of a chat. `num_bytes` of the result is the size of
    the tools, the arguments and the tool calls of `messages` as JSON."""
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    path = "chat_prompt.tools"
    if violations.count(path, len(prompt.tools), _MAX_TOOLS):
        tools = tuple(
            values.read(tool, f"{path}[{index}]", violations)
            for index, tool in enumerate(prompt.tools)
        )
    path = "chat_prompt.template_arguments"
    arguments = values.read(prompt.template_arguments, path, violations)
    calls = [
        (call.id, call.name, call.arguments) for message in messages for call in message.tool_calls
    ]
    data = [each for each in (tools, arguments, calls) if each]
    num_bytes = sum(num_utf8_bytes(json.dumps(each, ensure_ascii=False)) for each in data)
    return TemplateData(tools=tools, arguments=arguments, num_bytes=num_bytes)


def _tool_call(call: pb.ToolCall, path: str, violations: Violations, values: "_Values") -> ToolCall:
    violations.text_length(f"{path}.id", call.id, 0, _MAX_CALL_ID_CHARS)
    violations.text_length(f"{path}.name", call.name, 1, _MAX_NAME_CHARS)
    arguments = values.read(call.arguments, f"{path}.arguments", violations)
    return ToolCall(id=call.id, name=call.name, arguments=arguments)


class _Values:
    """Reads the JSON values of one chat prompt, and counts them."""

    def __init__(self) -> None:
        self._num = 0

    def read(self, struct: Struct, path: str, violations: Violations) -> Mapping[str, JsonValue]:
        """Convert a protobuf Struct to plain Python values.

        Records a violation and returns {} if it contains a number that is not finite or an unset
        value, or if the chat has too many values. The nesting is limited by protobuf.
        """
        if self._num > _MAX_VALUES:
            return {}
        try:
            return self._object(struct.fields)
        except ValueError:
            violations.add(path, "contains a number that is not finite, or an unset value")
        except OverflowError:
            violations.add(
                path,
                f"has, together with the other data of the chat template, more than {_MAX_VALUES}"
                " values",
            )
        return {}

    def _object(self, fields: Mapping[str, Value]) -> Mapping[str, JsonValue]:
        # Not `items()` of a protobuf map, because it takes three times as long.
        self._count(len(fields))
        return {name: self._plain(fields[name]) for name in fields} if fields else {}

    def _count(self, num_values: int) -> None:
        """Add `num_values` to the count before they are read. Raises OverflowError if the count
        exceeds `_MAX_VALUES`."""
        self._num += num_values
        if self._num > _MAX_VALUES:
            raise OverflowError

    def _plain(self, value: Value) -> JsonValue:
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
                values = value.list_value.values
                self._count(len(values))
                return [self._plain(inner) for inner in values]
            case "struct_value":
                return self._object(value.struct_value.fields)
            case _:
                raise ValueError("no value")


def _number(value: float) -> int | float:
    """Return `value`, as an int if it is an integer from -2**53 to 2**53, so that templates print 1
    and not 1.0. Raises ValueError if it is not finite."""
    if not math.isfinite(value):
        raise ValueError("not finite")
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT else value


def token_array(ids: Sequence[int]) -> NDArray[np.int64]:
    """Return `ids`, a `repeated uint32`, as int64 [n].

    If `ids` does not support the array protocol, they are converted in parts, because reading a
    part holds the GIL.
    """
    if len(ids) <= _FEW_IDS:
        return np.array(ids[:], dtype=np.int64)
    # Newer releases of protobuf: this copies memory, at 3.5 ns per id.
    if hasattr(ids, "__array__"):
        return np.array(ids, dtype=np.int64)
    found = np.empty(len(ids), dtype=np.int64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        found[start : start + IDS_AT_ONCE] = ids[start : start + IDS_AT_ONCE]
    return found


def _long_ids(ids: Sequence[int], path: str, limits: Limits) -> NDArray[np.int32]:
    violations = Violations()
    found = token_array(ids)
    check_token_ids(found, path, limits, violations)
    violations.raise_if_any()
    return found.astype(np.int32)
