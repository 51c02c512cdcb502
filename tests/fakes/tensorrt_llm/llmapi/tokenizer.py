"""A tokenizer that is loaded from a model's folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class TokenizerBase:
    """Encodes without special tokens, and decodes."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id

    @classmethod
    def from_folder(cls, folder: Path, eos_token_id: int | None) -> TokenizerBase | None:
        """Load it; return None if the folder has no `tokenizer.json`: the real package fails there
        or warns."""
        path = folder / "tokenizer.json"
        return cls(Tokenizer.from_file(str(path)), eos_token_id) if path.is_file() else None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
