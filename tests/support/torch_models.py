"""Tiny models with random weights as Hugging Face folders, and `NaiveModel`, which computes their
reference outputs.

The standard deviation of the weights is far above the usual 0.02, so that outputs are diverse and
depend on the whole context: with small weights a model repeats one token, regardless of attention.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
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


def _rotary(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **settings}


_GRANITE: dict[str, Any] = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_GRANITE["initializer_range"] = 0.1
_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama_tied_no_groups": lambda: LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "llama_biases": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama_linear": lambda: LlamaConfig(**_SHAPE, rope_parameters=_rotary("linear")),
    "llama_yarn": lambda: LlamaConfig(
        **_SHAPE, rope_parameters=_rotary("yarn", original_max_position_embeddings=160)
    ),
    "llama_llama3": lambda: LlamaConfig(
        **_SHAPE,
        rope_parameters=_rotary(
            "llama3",
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=160,
        ),
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2_window": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "phi3": lambda: Phi3Config(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "mistral_window": lambda: MistralConfig(**_SHAPE, sliding_window=32),
    "gemma2": lambda: Gemma2Config(
        **_GEMMA,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA, query_pre_attn_scalar=16),
    # Factors near one, and a layer without rotation: not visible in half precision.
    "granite_logits": lambda: GraniteConfig(**_GRANITE, logits_scaling=1.12),
    "granite_residual": lambda: GraniteConfig(**_GRANITE, residual_multiplier=0.95),
    "granite_embedding": lambda: GraniteConfig(**_GRANITE, embedding_multiplier=1.1),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0]),
}


def tiny_config(name: str) -> PretrainedConfig:
    return _CONFIGS[name]()


ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "mistral_window", "gemma2", "gemma3")
FUSED_SHAPES = (
    "llama",
    "llama_tied_no_groups",
    "llama_biases",
    "llama_linear",
    "llama_yarn",
    "llama_llama3",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "phi3",
    "mistral",
    "mistral_window",
)
"""Models that the fused step supports."""
HIDDEN_DIFFERENCES = {
    "granite_logits": "in the logits: .*0.893 times",
    "granite_residual": "in the output of layer 0: .*0.95.* times",
    "granite_embedding": "in the embeddings: .*1.1 times",
    "smollm3": "in the queries of layer 1: by .* at position",
}
"""Models that compute something else than the fused step, although their module tree is supported;
by model, the pattern of the message about the difference.
"""


def save_tiny_model(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: float
) -> Path:
    """Write the model `name`, with the same weights every time, and return `folder`.

    `changes`: other values of its configuration.
    """
    torch.manual_seed(7)
    config = tiny_config(name)
    for field, value in changes.items():
        setattr(config, field, value)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    return folder


class NaiveModel:
    """Runs a model in the simplest way: eager attention, no cache, one sequence, in float32.

    `tolerance`: how far below the greatest logit a greedy token may be, in standard deviations of
    the logits; above 0 for outputs that were computed in a coarser number format.
    """

    def __init__(self, folder: Path, device: str = "cpu", tolerance: float = 0.0) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
        )
        self._model = model.eval().to(device)
        self._device = device
        self._tolerance = tolerance

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits [len(tokens), V] of one forward pass over all tokens."""
        ids = torch.tensor([list(tokens)], device=self._device)
        logits: NDArray[np.float32] = (
            self._model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        )
        return logits

    def is_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Return whether each token of `output` has the greatest logit at its position, up to the
        tolerance; computed in one forward pass.
        """
        logits = self.logits([*prompt, *output][:-1])[len(prompt) - 1 :]
        missed = logits.max(-1) - logits[np.arange(len(output)), list(output)]
        return bool((missed <= self._tolerance * logits.std(-1)).all())
