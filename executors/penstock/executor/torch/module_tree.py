"""Recognises models that the fused step (the forward pass with Penstock's kernels) supports, by
their module tree.

The tree is the module tree of Llama, shared by Qwen2, Qwen3, Mistral and many others: each layer
has a norm, grouped-query attention with rotary embeddings (optional biases, norms of query and key,
a sliding window), a norm, and a gated SiLU. Nothing depends on a model's name; a model with a
parameter outside this tree is rejected. `structure_check` detects differences that are not visible
in the tree, such as a multiplier in the forward code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.eight_bit_linear import EightBitLinear
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.paged_attention import Scoring

_Kind = TypeVar("_Kind")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROTARY_KINDS = frozenset({"default", "linear", "llama3", "yarn"})
_MAX_HEAD_DIM = 256
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SEPARATE = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
_JOINED = {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}


class NotFused(Exception):
    """The fused step does not support this model, or cannot run here, for example without compiled
    kernels; the message contains the reason.
    """


LayerTree: TypeAlias = DecoderLayer[tuple[nn.Linear, ...]]
"""A layer whose products are linear layers with a common input, to be joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTree:
    """The parts of a model that the fused step uses. `eps`: the epsilon of all norms. `scaling`:
    factor of the attention scores. `rotary_scaling`: factor of cosines and sines.
    """

    layers: tuple[LayerTree, ...]
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    inverse_frequencies: Tensor
    rotary_scaling: float


def read_module_tree(model: LoadedModel) -> DecoderTree:
    """Return the tree of a loaded model. Raises NotFused naming the part that does not match."""
    if model.dtype not in _DTYPES:
        raise NotFused(f"weights of {model.dtype}")
    module: Any = model.module
    decoder = getattr(module, "model", None)
    if decoder is None:
        raise NotFused("no decoder module named model")
    embedding = _submodule(decoder, "embed_tokens", nn.Embedding)
    head = _submodule(module, "lm_head", nn.Linear)
    bias: Any = head.bias  # may be None, unlike its type annotation
    if bias is not None:
        raise NotFused("the head has a bias")
    shape = model.shapes[0]
    if any(other != shape for other in model.shapes):
        raise NotFused("layers with different head shapes")
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 2:
        raise NotFused(f"heads of {shape.head_dim} elements")
    layers = tuple(
        _read_layer(layer, scoring)
        for layer, scoring in zip(decoder.layers, model.scorings, strict=True)
    )
    _reject_rest(module, layers)
    rotary = _submodule(decoder, "rotary_emb", nn.Module)
    num_out = sum(linear.out_features for linear in layers[0].qkv)
    num_heads = num_out // shape.head_dim - 2 * shape.num_heads
    if num_heads % shape.num_heads:
        raise NotFused(f"{num_heads} query heads over {shape.num_heads} key heads")
    return DecoderTree(
        layers=layers,
        embedding=embedding.weight,
        head=head.weight,
        final_norm=_norm_weight(decoder, "norm"),
        eps=_common_eps(module),
        num_heads=num_heads,
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        scaling=_common_scaling(model.scorings),
        inverse_frequencies=_inverse_frequencies(rotary, shape.head_dim),
        rotary_scaling=float(getattr(rotary, "attention_scaling", 1.0)),
    )


def _read_layer(layer: Any, scoring: Scoring) -> LayerTree:
    if not scoring.is_plain:
        raise NotFused("attention scores with a soft cap or sinks")
    activation = getattr(getattr(layer, "mlp", None), "act_fn", None)
    if activation is None:
        activation = getattr(getattr(layer, "mlp", None), "activation_fn", None)
    if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        raise NotFused(f"an activation other than SiLU: {type(activation).__name__}")
    attention = layer.self_attn
    has_norms = [getattr(attention, name, None) is not None for name in ("q_norm", "k_norm")]
    return DecoderLayer(
        qkv=_linears(layer, "qkv"),
        out=(_linear(layer, "self_attn.o_proj"),),
        gate_up=_linears(layer, "gate_up"),
        down=(_linear(layer, "mlp.down_proj"),),
        input_norm=_norm_weight(layer, _NORMS[0]),
        output_norm=_norm_weight(layer, _NORMS[1]),
        query_norm=_norm_weight(attention, "q_norm") if has_norms[0] else None,
        key_norm=_norm_weight(attention, "k_norm") if has_norms[1] else None,
        window=scoring.window,
    )


def _submodule(owner: Any, name: str, kind: type[_Kind]) -> _Kind:
    found = getattr(owner, name, None)
    if not isinstance(found, kind):
        raise NotFused(f"{type(owner).__name__} has no {kind.__name__} under the name {name}")
    return found


def _linear(layer: Any, path: str) -> nn.Linear:
    owner: Any = layer
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    found = _submodule(owner, name, nn.Linear)
    if type(found) not in (nn.Linear, EightBitLinear):
        raise NotFused(f"{path} is a {type(found).__name__}")
    return found


def _linears(layer: Any, group: str) -> tuple[nn.Linear, ...]:
    """Return the linear layers of a `group` (qkv or gate_up): one if the model has them joined."""
    joined = _JOINED[group]
    owner = getattr(layer, joined[0].split(".", maxsplit=1)[0], None)
    has_joined = hasattr(owner, joined[0].split(".")[1])
    names = joined if has_joined else _SEPARATE[group]
    return tuple(_linear(layer, name) for name in names)


def _norm_weight(owner: Any, name: str) -> Tensor:
    norm = getattr(owner, name, None)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not hasattr(norm, "variance_epsilon"):
        raise NotFused(f"{type(owner).__name__} has no RMS norm under the name {name}")
    return weight


def _reject_rest(module: nn.Module, layers: Iterable[LayerTree]) -> None:
    """Raise NotFused for a model with parameters that the fused step would not use."""
    decoder: Any = module.get_submodule("model")
    known = {id(decoder.embed_tokens.weight), id(module.get_submodule("lm_head").weight)}
    known.add(id(decoder.norm.weight))
    for layer in layers:
        for linear in chain(*layer.products):
            known.update(id(parameter) for parameter in linear.parameters())
        norms = (layer.input_norm, layer.output_norm, layer.query_norm, layer.key_norm)
        known.update(id(norm) for norm in norms if norm is not None)
    foreign = [name for name, value in module.named_parameters() if id(value) not in known]
    if foreign:
        raise NotFused(f"parameters without a place: {', '.join(sorted(foreign)[:3])}")


def _common_eps(module: nn.Module) -> float:
    found = {
        float(norm.variance_epsilon)  # type: ignore[arg-type] # an attribute of a foreign module
        for norm in module.modules()
        if hasattr(norm, "variance_epsilon")
    }
    if len(found) != 1:
        raise NotFused(f"norms with different epsilons: {sorted(found)}")
    return found.pop()


def _common_scaling(scorings: tuple[Scoring, ...]) -> float:
    found = {scoring.scaling for scoring in scorings}
    if len(found) != 1:
        raise NotFused("layers that scale their scores differently")
    return found.pop()


def _inverse_frequencies(rotary: Any, head_dim: int) -> Tensor:
    kind = getattr(rotary, "rope_type", "default")
    if kind not in _ROTARY_KINDS:
        raise NotFused(f"rotary embeddings of type {kind}")
    frequencies = getattr(rotary, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.shape != (head_dim // 2,):
        raise NotFused("rotary embeddings of only a part of a head")
    return frequencies
