"""Models with random weights, small enough for the contract tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Return a function of (vocabulary size, token id) that returns the folder of a random
    two-layer Llama.

    The embedding of that token id is NaN, so that a request that contains it has no finite logits.
    """

    @functools.cache
    def make(vocab_size: int, poison: int) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                # Wide enough that no two logits come near a tie.
                initializer_range=0.5,
                tie_word_embeddings=False,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
        with torch.no_grad():
            model.model.embed_tokens.weight[poison] = float("nan")
        folder = tmp_path_factory.mktemp("tiny-llama")
        model.save_pretrained(folder)
        return folder

    return make
