"""Computes the text of each token id, once per model.

Interprets the decoder in tokenizer.json. There is a table if the bytes of a token do not depend on
its neighbours; otherwise the table is None.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import tokenizers

from penstock.server.text.tokenizer_settings import Step, TokenizerSettings, bytes_of_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BATCH = 4096

Piece = str | bytes
"""The text of a token, or its bytes if these are not whole characters."""


class FirstToken(enum.Enum):
    """How the decoder treats the first token of a text. LIKE_OTHERS means that the token has the
    same text as anywhere else."""

    LIKE_OTHERS = enum.auto()
    STRIPS_TEXT = enum.auto()
    """Up to `num_stripped` occurrences of `stripped` are removed at the start of the text."""
    HAS_OWN_PIECE = enum.auto()
    """The first token loses all its word markers (Metaspace)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """The table that all streams of a model share. It is immutable.

    `pieces` [vocab_size or more] has the text or bytes (`Piece`) of each token id. Unknown ids, and
    special tokens if they are skipped, have "". If `first` is HAS_OWN_PIECE, `first_piece` of an id
    replaces its piece at the start of a text. Ids in `skipped` are not considered the start.
    `marked` has the tokens with their word markers (`word_mark`), only for HAS_OWN_PIECE. If
    `is_per_byte`, each invalid byte becomes a U+FFFD (byte fallback); otherwise each invalid
    sequence of bytes does.
    """

    pieces: Sequence[Piece]
    first: FirstToken = FirstToken.LIKE_OTHERS
    stripped: str = ""
    num_stripped: int = 0
    word_mark: str = ""
    skipped: frozenset[int] = frozenset()
    marked: tuple[str | None, ...] = ()
    is_per_byte: bool = False

    def first_piece(self, token_id: int) -> Piece:
        """Return the piece of the token at the start of a text. Call this only if `first` is
        HAS_OWN_PIECE."""
        token = self.marked[token_id]
        return "" if token is None else token.replace(self.word_mark, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """How a decoder converts tokens to bytes, each independently of the others."""

    to_bytes: Callable[[Sequence[str]], list[bytes]]
    first: FirstToken = FirstToken.LIKE_OTHERS
    stripped: str = ""
    num_stripped: int = 0
    word_mark: str = ""
    is_per_byte: bool = False


def build_token_table(
    tokenizer: tokenizers.Tokenizer, *, num_ids: int, skip_special_tokens: bool = True
) -> TokenTable | None:
    """Build the table for at least the ids below `num_ids`. Returns None if the text of a token may
    depend on its neighbours."""
    shape = _shape(tokenizer)
    if shape is None:
        return None
    added = tokenizer.get_added_tokens_decoder()
    num_ids = max([num_ids, tokenizer.get_vocab_size(True), *(i + 1 for i in added)])
    to_token = tokenizer.id_to_token
    tokens: list[str | None] = [to_token(token_id) for token_id in range(num_ids)]
    skipped: frozenset[int] = frozenset()
    if skip_special_tokens:
        # The library skips tokens by content: an id with the same text as a special token is
        # skipped too.
        special = {token.content for token in added.values() if token.special}
        skipped = frozenset(i for i, token in enumerate(tokens) if token in special)
    skipped |= {i for i, token in enumerate(tokens) if token is None}
    pieces: list[Piece] = []
    for start in range(0, num_ids, _BATCH):
        batch = tokens[start : start + _BATCH]
        pieces += [_piece(data) for data in shape.to_bytes([token or "" for token in batch])]
    for token_id in skipped:
        pieces[token_id] = ""
    return TokenTable(
        pieces=pieces,
        first=shape.first,
        stripped=shape.stripped,
        num_stripped=shape.num_stripped,
        word_mark=shape.word_mark,
        skipped=skipped,
        marked=tuple(tokens) if shape.first is FirstToken.HAS_OWN_PIECE else (),
        is_per_byte=shape.is_per_byte,
    )


def _piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _shape(tokenizer: tokenizers.Tokenizer) -> _Shape | None:
    """Return how the decoder converts tokens; None unless all its steps are known and convert each
    token independently."""
    steps = TokenizerSettings(tokenizer).decoder
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _Shape(to_bytes=bytes_of_tokens)
    if kinds == ["Metaspace"]:
        return _metaspace_shape(steps[0])
    return _replacing_shape(steps, kinds)


def _metaspace_shape(step: Step) -> _Shape | None:
    mark, scheme = step.get("replacement"), step.get("prepend_scheme")
    if not isinstance(mark, str) or scheme not in ("always", "first", "never"):
        return None

    def to_bytes(tokens: Sequence[str]) -> list[bytes]:
        return [token.replace(mark, " ").encode() for token in tokens]

    if scheme == "never":
        return _Shape(to_bytes=to_bytes)
    return _Shape(to_bytes=to_bytes, first=FirstToken.HAS_OWN_PIECE, word_mark=mark)


def _replacing_shape(steps: list[Step], kinds: list[object]) -> _Shape | None:
    """Return the shape of a decoder with the steps Replace*, ByteFallback?, Fuse, Strip? and at
    least one of the first two. SentencePiece vocabularies have such decoders.

    Returns None for any other decoder, for a Replace with a regular expression, and for a Strip at
    the end of the text.
    """
    replacements: list[tuple[str, str]] = []
    while kinds and kinds[0] == "Replace":
        pattern = cast("Step", steps[0].get("pattern") or {}).get("String")
        content = steps[0].get("content")
        if not isinstance(pattern, str) or not isinstance(content, str):
            return None
        replacements.append((pattern, content))
        steps, kinds = steps[1:], kinds[1:]
    has_fallback = kinds[:1] == ["ByteFallback"]
    if has_fallback:
        steps, kinds = steps[1:], kinds[1:]
    if not (has_fallback or replacements) or kinds not in (["Fuse"], ["Fuse", "Strip"]):
        return None

    def to_bytes(tokens: Sequence[str]) -> list[bytes]:
        found: list[bytes] = []
        for token in tokens:
            for pattern, content in replacements:
                token = token.replace(pattern, content)
            match = _BYTE_TOKEN.fullmatch(token) if has_fallback else None
            found.append(bytes([int(match[1], 16)]) if match else token.encode())
        return found

    if kinds == ["Fuse"]:
        return _Shape(to_bytes=to_bytes, is_per_byte=has_fallback)
    strip = steps[1]
    stripped, start, stop = strip.get("content"), strip.get("start"), strip.get("stop")
    # Stripping the end of a text is impossible before the end is known.
    if not isinstance(stripped, str) or not isinstance(start, int) or stop != 0:
        return None
    return _Shape(
        to_bytes=to_bytes,
        first=FirstToken.STRIPS_TEXT,
        stripped=stripped,
        num_stripped=start,
        is_per_byte=has_fallback,
    )
