"""The prompt of a request, of each kind."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.server.front.generation import ChatInput, TextInput
from penstock.server.front.limits import Limits
from penstock.server.front.submission import refuse_prompt
from penstock.server.rpc.mapping_in.chat_message import (
    read_message,
    read_template_data,
)
from penstock.server.rpc.mapping_in.token_ids import token_array
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.outline import MAX_PARTS
from penstock.server.text.chat_template import NO_DATA, ChatMessage
from penstock.server.text.token_bound import num_utf8_bytes
from penstock.v1.prompt_pb2 import ChatPrompt, TextPrompt

_NO_IDS: Final = np.array([], dtype=np.int32)
TEXT_PATH = "text_prompt.text"
TOKENS_PATH = "token_prompt.ids"
CHAT_PATH = "chat_prompt.messages"
WINDOW_PATH = "chat_prompt.window_tokens"


def read_text(prompt: TextPrompt, limits: Limits, violations: Violations) -> TextInput:
    """A plain text prompt; its size is checked before it is tokenised."""
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
) -> NDArray[np.int32]:
    """Token ids, 1 to the context's length of them, each within the vocabulary."""
    if not ids:
        violations.add(path, "must not be empty")
        return _NO_IDS
    if len(ids) > limits.max_context_tokens:
        violations.prompt_too_long(refuse_prompt(path, len(ids), limits).refusal)
        return _NO_IDS
    found = token_array(ids)
    check_token_ids(found, path, limits, violations)
    return found.astype(np.int32)


def check_token_ids(
    ids: NDArray[np.int64], path: str, limits: Limits, violations: Violations
) -> None:
    """Record every id that is not in the vocabulary."""
    for index in np.flatnonzero(ids >= limits.vocab_size).tolist():
        violations.add(f"{path}[{index}]", f"must be below {limits.vocab_size}")
        if violations.is_full:
            return


def read_chat(prompt: ChatPrompt, limits: Limits, violations: Violations) -> ChatInput:
    """A chat prompt; the rendered text is bounded when the template is applied."""
    messages: list[ChatMessage] = []
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
        for index, message in enumerate(prompt.messages):
            messages.append(read_message(message, f"{CHAT_PATH}[{index}]", violations))
    data = read_template_data(prompt, messages, violations) if is_readable else NO_DATA
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
