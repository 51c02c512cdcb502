"""Computes a lower bound on the number of tokens of a text from the length of the text alone.

Checks the conditions for such a bound. Does not encode anything.
"""

from typing import cast

import tokenizers
from tokenizers import models

from penstock.server.text.tokenizer_settings import (
    Step,
    TokenizerSettings,
    bytes_of_tokens,
    to_byte_level,
)

# Maximum factor by which a normaliser shortens a text in UTF-8. Composition (NFC) leaves more than
# a third: at worst eight bytes become a three-byte letter, and five bytes a two-byte letter.
_SHRINKING = {"NFC": 3, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits"}


class TokenBound:
    """A lower bound on the number of tokens of a text, from the largest number of bytes per token.

    `max_bytes_per_token` is 0 if it is unknown. It is known for vocabularies that can represent all
    bytes, if no step before the model drops text. Otherwise an unknown word of any length may
    become a single token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.max_bytes_per_token = 0
        settings = TokenizerSettings(tokenizer)
        factor = _shrinking(settings.normalizer)
        if not factor or not _keeps_text(tokenizer, settings.pre_tokenizer):
            return
        if not isinstance(tokenizer.model, models.BPE):
            return
        vocabulary: dict[str, int] = tokenizer.get_vocab(True)
        if settings.is_byte_level:
            alphabet = [to_byte_level(bytes([byte])) for byte in range(256)]
            longest = max(map(len, bytes_of_tokens(vocabulary)), default=0)
        else:
            alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
            longest = max((len(token.encode()) for token in vocabulary), default=0)
            if not tokenizer.model.byte_fallback:
                return
        if all(token in vocabulary for token in alphabet):
            self.max_bytes_per_token = factor * longest

    def min_num_tokens(self, num_bytes: int) -> int:
        """Return the minimum number of tokens of a text of `num_bytes` bytes, without special
        tokens; 0 if unknown."""
        if not self.max_bytes_per_token:
            return 0
        return -(-num_bytes // self.max_bytes_per_token)


def num_utf8_bytes(text: str) -> int:
    """Return the length of `text` in UTF-8, in constant time for plain ASCII."""
    return len(text) if text.isascii() else len(text.encode())


def _keeps_text(tokenizer: tokenizers.Tokenizer, steps: list[Step]) -> bool:
    """Return True if no text is dropped before the model: no added token except special ones strips
    the whitespace next to it, and no pre-tokenizer removes text."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any((token.lstrip or token.rstrip) and not token.special for token in added):
        return False
    return all(
        step.get("type") in _PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps
    )


def _shrinking(steps: list[Step]) -> int:
    """Return the maximum factor by which the normaliser's steps shorten a text; 0 if no limit is
    known.
    """
    factor = 1
    for step in steps:
        pattern = cast("dict[str, str]", step.get("pattern") or {}).get("String", "")
        is_shortening = step.get("type") == "Replace" and (
            not pattern or len(str(step.get("content")).encode()) < len(pattern.encode())
        )
        factor *= 0 if is_shortening else _SHRINKING.get(str(step.get("type")), 0)
    return factor
