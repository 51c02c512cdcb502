"""The structure of a tokenizer, as in tokenizer.json, without its vocabulary.

The only way to inspect the parts of a tokenizers.Tokenizer, whose options Python cannot read.
"""

import json
from typing import cast

import tokenizers
from tokenizers import models

Step = dict[str, object]

_NESTED = ("normalizers", "pretokenizers", "decoders")


class TokenizerSettings:
    """The steps of each stage in order, sequences flattened; empty for an unused stage."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Serialised through a copy without vocabulary, which may have tens of megabytes.
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
        """Whether the model operates on bytes, written in the byte-level alphabet."""
        return any(step.get("type") == "ByteLevel" for step in self.normalizer + self.pre_tokenizer)


def _flat(step: object) -> list[Step]:
    if not isinstance(step, dict):
        return []
    known = cast("Step", step)
    for key in _NESTED:
        if isinstance(inner := known.get(key), list):
            return [flat for part in cast("list[object]", inner) for flat in _flat(part)]
    return [known]
