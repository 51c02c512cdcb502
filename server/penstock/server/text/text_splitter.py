"""Splits a long text into parts that have the same tokens when they are encoded separately.

A split between a letter and a following space, line break, full stop or comma is safe, for these
reasons. A vocabulary is applied within the words that a pre-tokenizer produces, never across them.
The supported patterns match from left to right and check no character before a match. None of them
matches a letter together with such a following character. Therefore there is always a word boundary
at the split, and the text before it does not affect how the text after it is divided into words.
This module does not encode anything.
"""

import re
from collections.abc import Iterator, Sequence
from typing import cast

import tokenizers

from penstock.server.text.tokenizer_settings import Step, TokenizerSettings

SLICE_CHARS = 16 << 10
"""Characters per slice. A slice is encoded in 5 to 20 ms, and its ids are listed in less than 1
ms."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_KNOWN_ALTERNATIVES = frozenset(
    {
        *_CONTRACTIONS.split("|"),
        f"(?i:{_CONTRACTIONS})",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r" ?\p{L}+",
        r"\p{N}",
        r"\p{N}+",
        r"\p{N}{1,3}",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    }
)
"""Alternatives in the patterns of GPT-2, Llama 3, Qwen and others, in Oniguruma notation."""
# Characters that are letters in every release of Unicode.
_LETTER = "[A-Za-z\u4e00-\u9fa5]"
_SAFE_SPLIT = re.compile(rf"(?<={_LETTER})[ \n.,\u3002\uff0c]")
_SAFE_SPLIT_AT_SPACE = re.compile(rf"(?<={_LETTER}) ")


class TextSplitter:
    """Splits long texts for one tokenizer. If no split is known to be safe, a text is one slice."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._find = _split_pattern(tokenizer)

    def slice_chars(self, num_chars: int) -> int:
        """Return the approximate number of characters of each slice of a text of `num_chars`
        characters."""
        return num_chars if self._find is None else min(num_chars, SLICE_CHARS)

    def slices(self, text: str) -> Iterator[str]:
        """Yield consecutive parts of `text`, of about SLICE_CHARS characters each; longer if there
        is no safe split."""
        start, length = 0, len(text)
        while start < length:
            stop = self._next_split(text, start + SLICE_CHARS)
            yield text[start:stop]
            start = stop

    def _next_split(self, text: str, position: int) -> int:
        """Return the first safe split from `position` on, or the end of the text."""
        if self._find is None:
            return len(text)
        while position < len(text):
            # A search holds the GIL until it returns.
            found = self._find.search(text, position, position + SLICE_CHARS)
            if found is not None:
                return found.start()
            position += SLICE_CHARS
        return len(text)


def _split_pattern(tokenizer: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    settings = TokenizerSettings(tokenizer)
    if any(step.get("type") != "NFC" for step in settings.normalizer):
        return None
    for token in tokenizer.get_added_tokens_decoder().values():
        # Such a token may span a split.
        is_greedy = token.lstrip or token.rstrip or token.single_word
        if is_greedy or re.search(rf"{_LETTER}[\s.,\u3002\uff0c]", token.content):
            return None
    return _pattern_of(settings.pre_tokenizer)


def _pattern_of(steps: Sequence[Step]) -> re.Pattern[str] | None:
    """Return the pattern of the positions where a text may be split, given the pre-tokenisation
    steps. None if there is no step or the first one is not known.

    Only the first step matters. Later steps split only within the words that the first step
    produces.
    """
    if not steps:
        return None
    first, kind = steps[0], steps[0].get("type")
    if kind == "ByteLevel" and first.get("use_regex") is True:
        return _SAFE_SPLIT
    if kind == "Split" and first.get("behavior") == "Isolated" and first.get("invert") is False:
        pattern = cast("dict[str, str]", first.get("pattern") or {}).get("Regex", "")
        return _SAFE_SPLIT if _is_known(pattern) else None
    if kind == "Metaspace" and first.get("split") is True:
        return _SAFE_SPLIT_AT_SPACE
    return None


def _is_known(pattern: str) -> bool:
    """Return True if all alternatives of a regular expression are in `_KNOWN_ALTERNATIVES`."""
    depth = 0
    depths = [depth := depth + (char == "(") - (char == ")") for char in pattern]
    borders = [i for i, char in enumerate(pattern) if char == "|" and depths[i] == 0]
    starts = [0, *(border + 1 for border in borders)]
    parts = (pattern[a:b] for a, b in zip(starts, [*borders, len(pattern)], strict=True))
    return all(part in _KNOWN_ALTERNATIVES for part in parts)
