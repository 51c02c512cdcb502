"""The model: each token is a hash of all tokens before it, independent of batch and chunk.

It defines vocabulary, context length and logits. The token with the highest logit is known without
computing the logits, so greedy requests cost almost nothing.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0xD6E8FEB86659FD93
_TOP: Final = 0x9E3779B97F4A7C15
TOP_LOGIT: Final = 9.0
"""Logit of the likeliest token; all others are in [0, 8)."""


def advance(state: int, tokens: Iterable[int]) -> int:
    """Return the hash `state`, extended by `tokens`."""
    for token in tokens:
        state = ((state ^ (token + 0x632BE5AB)) * _STEP) & _MASK
        state ^= state >> 32
    return state


class HashedModel:
    """A model with the sizes from the `config.json` in its folder."""

    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vocab_size = int(config["vocab_size"])
        self.max_position_embeddings = int(config["max_position_embeddings"])
        self._scatter = (np.arange(self.vocab_size, dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0xBF58476D1CE4E5B9
        )

    def top_token(self, state: int) -> int:
        return (((state * _TOP) & _MASK) >> 33) % self.vocab_size

    def logits(self, state: int) -> NDArray[np.float64]:
        """Return logits [vocab] in [0, 8), except TOP_LOGIT for the top token."""
        values = self._scatter ^ np.uint64(state)
        values = (values ^ (values >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        logits = (values >> np.uint64(11)).astype(np.float64) * (8.0 / (1 << 53))
        logits[self.top_token(state)] = TOP_LOGIT
        return logits
