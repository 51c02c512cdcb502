"""A prompt in any of its forms becomes token ids, off the loop where that takes long.

Owns the order of the checks: what can be refused by counting bytes is refused before a tokenizer
sees it.
"""

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.server.front.errors import refuse_feature, refuse_field
from penstock.server.front.generation import ChatInput, Generation, TextInput, TokenInput
from penstock.server.front.limits import Limits
from penstock.server.front.submission import TokenisedPrompt, hash_prompt, refuse_prompt
from penstock.server.text.errors import ChatTemplateMissing, TextError, WindowTooSmall
from penstock.server.text.model_text import ModelText

_MAX_TOKENS_HASHED_ON_LOOP = 4096
"""About a third of a millisecond."""
_SALT_BYTES = 16
_WINDOW_PATH = "chat.window_tokens"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompt:
    """Token ids int32 [n] and the `text` they came from, empty for token ids.

    `num_dropped_messages`: how many of a dialogue's oldest its window left out.
    """

    ids: NDArray[np.int32]
    text: str = ""
    num_dropped_messages: int = 0


async def encode_prompt(
    prompt: TextInput | TokenInput | ChatInput, path: str, text: ModelText, limits: Limits
) -> EncodedPrompt:
    """The prompt as token ids.

    Raises RequestError when the text is too long to ever fit, cannot be used, or becomes tokens
    that the model does not have (a tokenizer may know more of them than the model embeds).
    """
    tokenizer = text.tokenizer
    match prompt:
        case TokenInput():
            return EncodedPrompt(ids=np.array(prompt.ids, dtype=np.int32))
        case TextInput():
            _check_length(len(prompt.text.encode()), path, text, limits)
            ids = await _guarded(
                tokenizer.encode_async(prompt.text, add_special_tokens=prompt.add_special_tokens),
                path,
            )
            return EncodedPrompt(ids=_embedded(ids, path, limits), text=prompt.text)
        case ChatInput():
            if prompt.window_tokens is None:
                num_bytes = sum(len(message.content.encode()) for message in prompt.messages)
                _check_length(num_bytes, path, text, limits)
            chat = await _guarded(
                tokenizer.encode_chat_async(
                    prompt.messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    max_bytes=limits.config.max_prompt_bytes,
                    window_tokens=prompt.window_tokens,
                ),
                path,
            )
            return EncodedPrompt(
                ids=_embedded(chat.ids, path, limits),
                text=chat.text,
                num_dropped_messages=chat.num_dropped_messages,
            )


async def tokenise(
    generation: Generation, text: ModelText, limits: Limits
) -> tuple[TokenisedPrompt, str]:
    """The prompt as ids with block hashes, and the text it came from; raises RequestError."""
    encoded = await encode_prompt(generation.prompt, generation.prompt_path, text, limits)
    ids, prompt_text = encoded.ids, encoded.text
    if len(ids) > limits.max_prompt_tokens:
        # Refused with the exact count by the check that follows; not worth hashing.
        return TokenisedPrompt(ids=ids), prompt_text

    def hashed() -> TokenisedPrompt:
        prompt = hash_prompt(
            ids,
            generation,
            limits.block_size,
            is_prefix_caching=limits.config.is_prefix_caching,
            random_salt=lambda: secrets.token_bytes(_SALT_BYTES),
            shares_across_tenants=limits.config.shares_prefixes_across_tenants,
        )
        return replace(prompt, num_dropped_messages=encoded.num_dropped_messages)

    if len(ids) <= _MAX_TOKENS_HASHED_ON_LOOP:
        return hashed(), prompt_text
    return await asyncio.to_thread(hashed), prompt_text


def _check_length(num_bytes: int, path: str, text: ModelText, limits: Limits) -> None:
    least = text.tokenizer.min_num_tokens(num_bytes)
    if least > limits.max_context_prompt_tokens:
        raise refuse_prompt(path, least, limits, qualifier="at least ")


def _embedded(ids: NDArray[np.int32], path: str, limits: Limits) -> NDArray[np.int32]:
    """`ids`; raises RequestError where the tokenizer knows a token that the model has not."""
    highest = int(ids.max(initial=-1))
    if highest >= limits.vocab_size:
        raise refuse_field(
            path, f"becomes token {highest}, the model has tokens below {limits.vocab_size}"
        )
    return ids


async def _guarded(encoding: Awaitable[T], path: str) -> T:
    try:
        return await encoding
    except ChatTemplateMissing:
        raise refuse_feature("chat_prompt", path) from None
    except WindowTooSmall as error:
        raise refuse_field(_WINDOW_PATH, str(error)) from error
    except TextError as error:
        raise refuse_field(path, str(error)) from error
