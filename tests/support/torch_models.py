"""Tiny models with random weights, written as Hugging Face folders, and what they state naively.

The initial deviation is far above the usual 0.02, so that outputs are diverse and depend on the
whole context: with small weights a model repeats one token whatever its attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 256
MAX_SEQ_LEN = 640
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_SEQ_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GEMMA = {
    **_SHAPE,
    # Gemma's scaled, tied embeddings would repeat the last token for ever.
    "tie_word_embeddings": False,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


def tiny_config(name: str) -> PretrainedConfig:
    """The configuration of one of ARCHITECTURES."""
    match name:
        case "llama":
            return LlamaConfig(**_SHAPE)
        case "llama_tied_no_groups":
            return LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4, "tie_word_embeddings": True})
        case "qwen2":
            return Qwen2Config(**_SHAPE)
        case "qwen3":
            return Qwen3Config(**_SHAPE)
        case "mistral":
            return MistralConfig(**_SHAPE, sliding_window=None)
        case "mistral_window":
            return MistralConfig(**_SHAPE, sliding_window=32)
        case "gemma2":
            return Gemma2Config(
                **_GEMMA,
                query_pre_attn_scalar=16,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=30.0,
            )
        case "gemma3":
            return Gemma3TextConfig(**_GEMMA, query_pre_attn_scalar=16)
        case _:
            raise ValueError(f"no tiny model is called {name!r}")


ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "mistral_window", "gemma2", "gemma3")


def save_tiny_model(name: str, folder: Path) -> Path:
    """Write a float32 model of the architecture to `folder`; the same one every time."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(name))
    model.to(torch.float32).save_pretrained(folder)
    return folder


class NaiveModel:
    """The same folder run in the plainest way: eager attention, no cache, one sequence."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
        )
        self._model = model.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(tokens), V] of one full forward."""
        ids = torch.tensor([list(tokens)], device=self._device)
        logits: NDArray[np.float32] = (
            self._model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        )
        return logits

    def is_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether `output` is what one gets by taking the likeliest token again and again.

        One forward over everything reports: each token must be the greatest of the logits before
        it.
        """
        logits = self.logits([*prompt, *output][:-1])
        likeliest: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        return likeliest == list(output)
