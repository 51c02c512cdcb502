"""Prompts: text, token ids or a conversation, which may contain images.

Defines the prompt types and converts plain Python values to prompts.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image in a message.

    Attributes:
        data: The bytes of its file.
        mime_type: "image/png", "image/jpeg" or "image/webp".
    """

    data: bytes
    mime_type: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model made in an earlier message.

    Attributes:
        name: Name of the tool.
        arguments: A JSON object.
        id: The `tool_call_id` of the message with the result; "" for none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Usually "system", "user", "assistant" or "tool".
        content: A text, or texts and images in the order in which the model reads them.
        name: Name of the author or of the tool.
        tool_calls: Tool calls of an assistant's message.
        tool_call_id: The id of the tool call whose result this message contains.
    """

    role: str
    content: "str | tuple[str | Image, ...]" = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


ChatMessageLike: TypeAlias = ChatMessage | Mapping[str, Any]
"""A message, or a dict with its fields as keys: {"role": "user", "content": "Hello"}.

The keys are those of OpenAI's messages. `content` is a text, a list of parts, or None. A part is a
text, an `Image`, {"type": "text", "text": TEXT} or {"type": "image_url", "image_url": {"url": URL}}
with a data URL, because neither client nor server downloads images. A tool call is a `ToolCall` or
{"id": ID, "type": "function", "function": {"name": NAME, "arguments": OBJECT or JSON text}}. Keys
with the value None are ignored; an unknown key raises TypeError.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text, which the server tokenises.

    Attributes:
        text: The text.
        add_special_tokens: Prepend a token such as BOS, if the model has one; None: the server's
            default, True.
    """

    text: str
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids, used unchanged.

    Attributes:
        ids: Ids of the model's vocabulary.
    """

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, which the server renders with the model's chat template.

    Attributes:
        messages: The messages, oldest first.
        add_generation_prompt: End with the start of the assistant's message; None: the server's
            default, True.
        window_tokens: Maximum length of the rendered prompt, in tokens. The oldest messages are
            dropped to fit, see `Accepted.num_dropped_messages`. None: a conversation that is too
            long raises `PromptTooLong`.
        tools: JSON objects for the template, {"type": "function", "function": {...}}.
        template_arguments: Other variables of the template, e.g. {"enable_thinking": False}.
    """

    messages: Sequence[ChatMessageLike]
    add_generation_prompt: bool | None = None
    window_tokens: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] | None = None


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt
"""A prompt of one of the prompt types."""

PromptLike: TypeAlias = Prompt | str | Sequence[int] | Sequence[ChatMessageLike]
"""The prompts that calls accept: also a str, token ids, or the messages of a conversation."""


def as_prompt(value: PromptLike) -> Prompt:
    """Convert a str to a TextPrompt, a sequence of ints to a TokenPrompt, and a sequence of
    messages to a ChatPrompt.

    A value that already is a prompt is returned unchanged. Raises TypeError for other types and
    ValueError for an empty sequence.
    """
    if isinstance(value, TextPrompt | TokenPrompt | ChatPrompt):
        return value
    if isinstance(value, str):
        return TextPrompt(text=value)
    if isinstance(value, Mapping):
        raise TypeError("prompt: must be a sequence of messages, not one message")
    wanted = "must be a str, a sequence of ints, or a sequence of messages (ChatMessage or dict)"
    given = cast(object, value)  # Without a type checker, callers may pass values of any type.
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
        raise TypeError(f"prompt: {wanted}, not {type(given).__name__}")
    items: tuple[Any, ...] = tuple(given)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not items:
        raise ValueError("prompt: must not be empty")
    if all(isinstance(item, ChatMessage | Mapping) for item in items):
        return ChatPrompt(messages=items)
    ids = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
    if len(ids) == len(items):
        return TokenPrompt(ids=ids)
    raise TypeError(f"prompt: {wanted}")


def as_message(value: ChatMessageLike, path: str) -> ChatMessage:
    """Convert a message, which may be a dict; see `ChatMessageLike`.

    Raises TypeError or ValueError. The error names the invalid field by a path that starts with
    `path`, and quotes no content.
    """
    if isinstance(value, ChatMessage):
        return value
    keys = _object(value, path, ("role", "content", "name", "tool_calls", "tool_call_id"))
    content = keys.get("content", "")
    if not isinstance(content, str):
        content = _each(content, f"{path}.content", _part, "a str or a list")
    return ChatMessage(
        role=_text(keys, "role", path),
        content=content,
        name=keys.get("name"),
        tool_calls=_each(keys.get("tool_calls", ()), f"{path}.tool_calls", _tool_call),
        tool_call_id=keys.get("tool_call_id"),
    )


def _part(value: Any, path: str) -> str | Image:
    if isinstance(value, str | Image):
        return value
    kind = _object(value, path).get("type")
    if kind == "text":
        return _text(_object(value, path, ("type", "text")), "text", path)
    if kind == "image_url":
        keys = _object(value, path, ("type", "image_url"))
        inner = f"{path}.image_url"
        url = _text(_object(keys.get("image_url"), inner, ("url",)), "url", inner)
        return _data_url(url, f"{inner}.url")
    raise ValueError(f"{path}.type: must be 'text' or 'image_url'")


def _data_url(url: str, path: str) -> Image:
    scheme, _, rest = url.partition(":")
    head, comma, data = rest.partition(",")
    if scheme != "data" or not comma or not head.endswith(";base64"):
        raise ValueError(
            f"{path}: must be 'data:image/TYPE;base64,DATA', because images are not downloaded"
        )
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{path}: the data is not base64") from None
    return Image(data=decoded, mime_type=head.removesuffix(";base64"))


def _tool_call(value: Any, path: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    keys = _object(value, path, ("id", "type", "function"))
    inner = f"{path}.function"
    function = _object(keys.get("function"), inner, ("name", "arguments"))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ValueError(f"{inner}.arguments: not JSON") from None
    if not isinstance(arguments, Mapping):
        raise TypeError(f"{inner}.arguments: must be a dict, not {type(arguments).__name__}")
    return ToolCall(
        name=_text(function, "name", inner),
        arguments=cast("Mapping[str, Any]", arguments),
        id=keys.get("id", ""),
    )


def _object(value: Any, path: str, known: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the entries of a dict that are not None. `known` lists its valid keys.

    If `known` is empty, all keys are valid. Raises TypeError for another type or an unknown key.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{path}: must be a dict, not {type(value).__name__}")
    keys = {key: item for key, item in cast("Mapping[str, Any]", value).items() if item is not None}
    for key in keys:
        if known and key not in known:
            nearest = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise TypeError(f"{path}.{key}: no such key; {hint}")
    return keys


def _each(
    value: Any, path: str, read: Callable[[Any, str], Any], wanted: str = "a list"
) -> tuple[Any, ...]:
    items: Sequence[Any] = value
    if not isinstance(value, list | tuple):
        raise TypeError(f"{path}: must be {wanted}, not {type(value).__name__}")
    return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(items))


def _text(keys: Mapping[str, Any], key: str, path: str) -> str:
    text = keys.get(key)
    if not isinstance(text, str):
        what = "missing" if text is None else f"must be a str, not {type(text).__name__}"
        raise TypeError(f"{path}.{key}: {what}")
    return text
