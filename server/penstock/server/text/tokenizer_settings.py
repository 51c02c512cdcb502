"""Reads the stages of a tokenizer: normaliser, pre-tokenizer and decoder.

Serialising a tokenizers.Tokenizer to JSON is the only way to inspect its stages, because their
options cannot be read in Python.

Contains GPT-2's alphabet, in which byte-level vocabularies represent bytes: printable Latin-1
characters represent themselves, and the characters from U+0100 on represent the other bytes, in
order.
"""

import json
from collections.abc import Iterable, Sequence
from typing import cast

import tokenizers
from tokenizers import models

Step = dict[str, object]

_NESTED = ("normalizers", "pretokenizers", "decoders")
_SEPARATOR = "\n"
_FOREIGN = "\uffff"
_BORDER = "\ufffe"


class TokenizerSettings:
    """The steps of `normalizer`, `pre_tokenizer` and `decoder`, each in order, with nested
    sequences flattened; empty if the tokenizer does not have the stage."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Serialise a copy without the vocabulary, which may have tens of megabytes.
        bare = tokenizers.Tokenizer(models.WordLevel({}, unk_token=""))
        if tokenizer.normalizer is not None:
            bare.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            bare.pre_tokenizer = tokenizer.pre_tokenizer
        if tokenizer.decoder is not None:
            bare.decoder = tokenizer.decoder
        settings = cast("Step", json.loads(bare.to_str()))
        self.normalizer = _flat(settings.get("normalizer"))
        self.pre_tokenizer = _flat(settings.get("pre_tokenizer"))
        self.decoder = _flat(settings.get("decoder"))

    @property
    def is_byte_level(self) -> bool:
        """True if the model operates on bytes, written in the byte-level alphabet."""
        return any(step.get("type") == "ByteLevel" for step in self.normalizer + self.pre_tokenizer)


def _flat(step: object) -> list[Step]:
    if not isinstance(step, dict):
        return []
    known = cast("Step", step)
    for key in _NESTED:
        if isinstance(inner := known.get(key), list):
            return [flat for part in cast("list[object]", inner) for flat in _flat(part)]
    return [known]


def _alphabet() -> list[str]:
    """Return the character of GPT-2's alphabet for each byte value, 256 in total."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_CHAR_OF_BYTE = _alphabet()
# Characters outside the alphabet must not be converted to bytes, so all of Latin-1 is mapped first.
_TO_LATIN_1 = (
    dict.fromkeys(range(256), _FOREIGN)
    | {ord(char): chr(byte) for byte, char in enumerate(_CHAR_OF_BYTE)}
    | {ord(_SEPARATOR): _BORDER}
)


def to_byte_level(data: bytes) -> str:
    """Return `data` in the byte-level alphabet."""
    return "".join([_CHAR_OF_BYTE[byte] for byte in data])


def bytes_of_tokens(tokens: Iterable[str]) -> list[bytes]:
    """Return the bytes of each token, as the ByteLevel decoder of the tokenizers library does.

    A token with a character outside the alphabet represents its UTF-8 bytes. All tokens are
    translated in one string, because this is several times faster than one by one.
    """
    listed: Sequence[str] = list(tokens)
    odd = {index: token for index, token in enumerate(listed) if _SEPARATOR in token}
    joined = _SEPARATOR.join("" if index in odd else token for index, token in enumerate(listed))
    pieces = joined.translate(_TO_LATIN_1).split(_BORDER) if listed else []
    found: list[bytes] = []
    for index, piece in enumerate(pieces):
        try:
            found.append(piece.encode("latin-1"))
        except UnicodeEncodeError:
            found.append(listed[index].encode())
    for index, token in odd.items():
        found[index] = token.encode()
    return found
