"""Converts token ids to text incrementally, without splitting a character.

The text does not depend on how the ids are distributed over calls: the joined texts of a stream
equal the result of `Detokenizer.decode` for all ids. The result equals the result of the tokenizers
library, with one deliberate exception. If a run of byte-fallback tokens is not valid UTF-8, the
library replaces the whole run, including complete characters. Here complete characters are kept,
because they may have been sent already, and only the invalid bytes become U+FFFD.
"""

import dataclasses
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from penstock.server.text.token_table import FirstToken, TokenTable, build_token_table

_REPLACEMENT = "�"
_MAX_HELD_TOKENS = 16


class DetokenizerStream(Protocol):
    """Converts the tokens of one output to text incrementally."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete. The bytes of an incomplete character
        are held back."""
        ...

    def push_one(self, token_id: int) -> str:
        """Same as `push` for one token, but faster."""
        ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Same as `push`, but return one text per token."""
        ...

    def flush(self) -> str:
        """End the stream and return the remaining text, with incomplete characters as U+FFFD."""
        ...


class Detokenizer:
    """Converts the token ids of one model to text. Its streams share one table with the text of
    each token id.

    If the text of a token depends on neighbouring tokens, there is no table, and streams decode a
    sliding window. This is several times slower.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        vocab_size: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Build the table. This takes about 0.2 s for 128,000 tokens. The table covers all ids of
        the tokenizer and all ids below `vocab_size`."""
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._table = build_token_table(
            tokenizer, num_ids=vocab_size, skip_special_tokens=skip_special_tokens
        )

    def extend_vocabulary(self, vocab_size: int) -> None:
        """Make later streams accept all ids below `vocab_size`. Unknown ids have no text."""
        table = self._table
        if table is not None and len(table.pieces) < vocab_size:
            unknown = range(len(table.pieces), vocab_size)
            self._table = dataclasses.replace(
                table,
                pieces=[*table.pieces, *[""] * len(unknown)],
                skipped=table.skipped.union(unknown),
            )

    def new_stream(self, *, is_continuation: bool = False) -> DetokenizerStream:
        """Create a stream. If `is_continuation`, it continues a text, so a leading space is
        kept."""
        table = self._table
        if table is None:
            return _WindowStream(self._tokenizer, skip_special_tokens=self._skips_special)
        if table.first is FirstToken.LIKE_OTHERS or is_continuation:
            return _TableStream(table)
        return _OpeningStream(table)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, or of its name if it is special; None if they depend on its
        neighbours or the id is unknown."""
        table = self._table
        if table is None or token_id >= len(table.pieces):
            return None
        piece: str | bytes | None = table.pieces[token_id]
        if token_id in table.skipped:
            piece = self._tokenizer.id_to_token(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens."""
        stream = self.new_stream()
        return stream.push(token_ids) + stream.flush()


class _TableStream:
    """A stream that looks up all tokens in the table, including the first token of a text."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._pending = b""

    def push_one(self, token_id: int) -> str:
        if not self._pending:
            piece = self._table.pieces[token_id]
            if isinstance(piece, str):
                return piece
        return "".join(self.pieces((token_id,)))

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table.pieces
        if not self._pending:
            found = [table[token_id] for token_id in token_ids]
            try:
                return "".join(found)  # type: ignore[arg-type]  # bytes are what the except is for
            except TypeError:
                pass
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        table = self._table.pieces
        texts: list[str] = []
        for token_id in token_ids:
            piece = table[token_id]
            if isinstance(piece, bytes):
                piece = self._extend(piece)
            elif self._pending and piece:
                piece = self._take_pending() + piece
            texts.append(piece)
        return texts

    def flush(self) -> str:
        return self._take_pending()

    def _take_pending(self) -> str:
        """Return the incomplete bytes as U+FFFD."""
        pending, self._pending = self._pending, b""
        if self._table.is_per_byte:
            return _REPLACEMENT * len(pending)
        return pending.decode(errors="replace")

    def _extend(self, data: bytes) -> str:
        """Add bytes, and return the characters that they complete, with U+FFFD for invalid
        bytes."""
        data = self._pending + data
        if self._table.is_per_byte:
            return self._extend_per_byte(data)
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def _extend_per_byte(self, data: bytes) -> str:
        texts: list[str] = []
        while True:
            try:
                text, num_used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                texts.append(data[: error.start].decode())
                texts.append(_REPLACEMENT * (error.end - error.start))
                data = data[error.end :]
                continue
            self._pending = data[num_used:]
            return "".join([*texts, text])


class _OpeningStream(_TableStream):
    """A stream that looks up tokens in the table, for a decoder that strips the start of the text
    or decodes the first token differently."""

    __slots__ = ("_num_to_strip",)

    def __init__(self, table: TokenTable) -> None:
        super().__init__(table)
        is_stripping = table.first is FirstToken.STRIPS_TEXT
        self._num_to_strip = table.num_stripped if is_stripping else 1

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._num_to_strip:
            return super().push(token_ids)
        return "".join(self.pieces(token_ids))

    def push_one(self, token_id: int) -> str:
        if not self._num_to_strip:
            return super().push_one(token_id)
        return "".join(self.pieces((token_id,)))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        if not self._num_to_strip:
            return super().pieces(token_ids)
        if self._table.first is FirstToken.STRIPS_TEXT:
            return [self._stripped(text) for text in super().pieces(token_ids)]
        return self._with_first(token_ids)

    def flush(self) -> str:
        return self._stripped(super().flush()) if self._num_to_strip else super().flush()

    def _stripped(self, text: str) -> str:
        content = self._table.stripped
        while self._num_to_strip and text:
            if not content or not text.startswith(content):
                self._num_to_strip = 0
                break
            text = text[len(content) :]
            self._num_to_strip -= 1
        return text

    def _with_first(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts of these tokens for a Metaspace decoder.

        At the start of a text, the first token that is not skipped has a different text than
        elsewhere.
        """
        table = self._table
        for index, token_id in enumerate(token_ids):
            if token_id in table.skipped:
                continue
            self._num_to_strip = 0
            first = table.first_piece(token_id)
            text = first if isinstance(first, str) else ""
            return [*[""] * index, text, *super().pieces(token_ids[index + 1 :])]
        return [""] * len(token_ids)


class _WindowStream:
    """A stream for a decoder for which the text of a token depends on its neighbours. Decodes a
    short window again for each token.

    `_window` has first the tokens whose text was returned (`_num_returned` of them, kept for
    context), and then the tokens whose text was not. `_returned` is the text of the first part.
    """

    __slots__ = ("_num_returned", "_returned", "_skips_special", "_tokenizer", "_window")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._window: list[int] = []
        self._num_returned = 0
        self._returned = ""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces(token_ids))

    def push_one(self, token_id: int) -> str:
        return self._step(token_id)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [self._step(token_id) for token_id in token_ids]

    def flush(self) -> str:
        text = self._decode(self._window)
        new = text[len(self._returned) :]
        self._window, self._num_returned, self._returned = [], 0, ""
        return new

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_returned
        if len(text) <= len(self._returned):
            # The context must not consist only of tokens without text (special tokens).
            if num_held > _MAX_HELD_TOKENS:
                del self._window[self._num_returned :]
            return ""
        # A replacement character at the end may be an incomplete character.
        if text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS:
            return ""
        new = text[len(self._returned) :]
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        self._returned = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)
        return text
