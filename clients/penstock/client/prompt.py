"""What a generation starts from: text, token ids or a dialogue, and images that go with it.

Owns the prompt types and how plain Python values are read as prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a dialogue. `role` is usually "system", "user" or "assistant"."""

    role: str
    content: str


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
    """A dialogue, oldest turn first; the server renders it with the model's chat template.

    `add_generation_prompt` (None: as the server does, True) ends it by opening the assistant's
    turn. `window_tokens` bounds the rendered prompt by leaving the oldest turns out, as many as
    `Accepted.num_dropped_messages` tells; None: a dialogue that is too long is refused.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool | None = None
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image the prompt refers to. `mime_type`: "image/png", "image/jpeg" or "image/webp"."""

    data: bytes
    mime_type: str


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt
PromptLike: TypeAlias = Prompt | str | Sequence[int] | Sequence[ChatMessage]


def as_prompt(value: PromptLike) -> Prompt:
    """Read a str as text, a sequence of ints as token ids, one of ChatMessage as a dialogue.

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
