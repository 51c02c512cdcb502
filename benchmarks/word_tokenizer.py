"""Writes a tokenizer for models with random weights.

Token n is the word "w" followed by n; text is split at spaces and punctuation.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer into a model's folder; token 2 is the end-of-sequence token."""
    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    tokenizer.save(str(folder / "tokenizer.json"))
