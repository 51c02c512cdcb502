"""Tiny configurations of all causal language models in the installed transformers.

The default configuration of a type is shrunk: attributes are recognised by name, and types that
need other values have an entry in `_OVERRIDES`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

VOCAB_SIZE = 256
MAX_SEQ_LEN = 256
MAX_PARAMETERS = 50_000_000
WINDOW = 32
_STDDEV = 0.3
"""Far above the usual 0.02: outputs differ from each other and depend on the whole context."""

_SHRUNK: dict[str, object] = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "model_dim", "emb_dim"), 64),
    **dict.fromkeys(
        ("embedding_size", "word_embed_proj_dim", "lru_width", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "global_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dim_ff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), MAX_SEQ_LEN
    ),
    "model_max_length": MAX_SEQ_LEN,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "query_pre_attn_scalar": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "is_decoder": True,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "use_mamba_kernels": False,
    "num_nextn_predict_layers": 0,
    "num_kv_shared_layers": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "state_size": 16,
    "hidden_size_per_layer_input": 16,
}
"""Tiny values by attribute name, for attributes that a configuration has and that are not None."""

_NEEDED = frozenset({"head_dim", "num_key_value_heads"})
"""Attributes that some types compute with although their default is None."""

_OVERRIDES: dict[str, dict[str, object]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"alibi": False, "max_position_embeddings": MAX_SEQ_LEN},
    "gemma3n_text": {"layer_types": ["full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "kimi_linear": {"num_experts": 4, "num_expert_group": 1, "topk_group": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16)},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values for types that the values by attribute name do not make tiny or valid."""


def _kinds(values: object, num_layers: int) -> list[object] | None:
    """Return `num_layers` entries that repeat the distinct entries of `values`, for the layers of
    the tiny model; None if `values` is empty, or neither a list nor a tuple.
    """
    if not isinstance(values, list | tuple) or not values:
        return None
    kinds: list[object] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return (kinds * num_layers)[:num_layers]


def _is_off(name: str, value: object) -> bool:
    """Return whether a value is a count of 0, which stays 0; token ids are no counts."""
    return type(value) is int and value == 0 and not name.endswith("_token_id")


def _layer_lists(config: Any) -> dict[str, object]:
    """Return, by attribute name, the lists that have one entry per layer, shortened to two."""
    num_default = getattr(config, "num_hidden_layers", None)
    return {
        name: _kinds(value, 2)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == num_default and name[0] != "_"
    }


def _tiny_values(config: Any) -> dict[str, object]:
    """Return the keyword arguments that make a configuration of this class tiny."""
    values = _layer_lists(config)
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            values[name] = _tiny_values(value)
        elif (
            name in _SHRUNK and not _is_off(name, value) and (value is not None or name in _NEEDED)
        ):
            values[name] = _SHRUNK[name]
    if "use_sliding_window" in values:
        values.pop("layer_types", None)  # made of the window
    if "kv_lora_rank" in values:
        values.update(num_key_value_heads=4, head_dim=_SHRUNK["qk_rope_head_dim"])
    if hasattr(config, "sliding_window"):
        values["sliding_window"] = WINDOW
    return values


def tiny_config(model_type: str, **overrides: object) -> PretrainedConfig:
    """Return a configuration of `model_type` with two layers; `overrides` are keyword arguments of
    its configuration class.
    """
    config_class: Any = CONFIG_MAPPING[model_type]
    values = _tiny_values(config_class())
    config: PretrainedConfig = config_class(
        **{**values, **_OVERRIDES.get(model_type, {}), **overrides}
    )
    return config


def tiny_model(config: PretrainedConfig) -> nn.Module:
    """Return a float32 model with random weights, the same every time."""
    with torch.device("meta"):
        shapes: Any = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in shapes.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters after shrinking")
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() > 1:
                parameter.copy_(noise * _STDDEV)
            else:
                parameter.add_(noise * 0.1)
    module: nn.Module = model.eval()
    return module
