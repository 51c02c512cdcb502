"""Creates models of common shapes with random weights, on the GPU, for the GPU benchmark.

Speed does not depend on the weights; the output is meaningless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from word_tokenizer import write_tokenizer

VOCAB_SIZE = 128_256
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        **_COMMON,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_COMMON,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
SHAPES["quick"] = {**SHAPES["1B"], "num_hidden_layers": 2, "hidden_size": 512, "head_dim": 16}


def model_folder(parent: Path, shape: str) -> Path:
    """Return the shape's folder in `parent`; create it if missing."""
    folder = parent / shape
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        write_tokenizer(folder, VOCAB_SIZE)
    return folder
