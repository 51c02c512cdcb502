"""What a generation starts from: text, token ids or a conversation with images in their places.

Owns the prompt types and how plain Python values are read as prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image in a message. `mime_type`: "image/png", "image/jpeg" or "image/webp"."""

    data: bytes
    mime_type: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an earlier answer made. `id`: for the message with its result."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    `role` is usually "system", "user", "assistant" or "tool". `content`: text, or texts and images
    in their order. `name`: of the author or of the tool. `tool_call_id`: of the call whose result
    this is.
    """

    role: str
    content: "str | tuple[str | Image, ...]" = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text; the server tokenises it. `add_special_tokens` None: as the server does, True."""

    text: str
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, oldest message first; the server renders it with the model's chat template.

    `add_generation_prompt` (None: as the server does, True) ends it with the opening of the
    assistant's message. `window_tokens` bounds the rendered prompt by leaving the oldest messages
    out, see `Accepted.num_dropped_messages`; None: a conversation that is too long is refused.
    `tools`: JSON objects for the template, {"type": "function", "function": {...}}.
    `template_arguments`: its other variables, e.g. {"enable_thinking": False}.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool | None = None
    window_tokens: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] | None = None


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt
PromptLike: TypeAlias = Prompt | str | Sequence[int] | Sequence[ChatMessage]


def as_prompt(value: PromptLike) -> Prompt:
    """Read a str as text, a sequence of ints as token ids, one of ChatMessage as a conversation.

    Raises TypeError for anything else and ValueError for an empty sequence.
    """
    if isinstance(value, TextPrompt | TokenPrompt | ChatPrompt):
        return value
    if isinstance(value, str):
        return TextPrompt(text=value)
    items = tuple(value)
    if not items:
        raise ValueError("prompt: must not be empty")
    messages = tuple(item for item in items if isinstance(item, ChatMessage))
    if len(messages) == len(items):
        return ChatPrompt(messages=messages)
    ids = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
    if len(ids) == len(items):
        return TokenPrompt(ids=ids)
    raise TypeError("prompt: must be a str, a sequence of ints, or a sequence of ChatMessage")
