"""The weights as the fused step on a CPU wants them: joined, and laid out for the matrix products.

Owns the packing, in 8 bits where that is asked for. The modules go on with views of the joined
matrices until `release_modules`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.executor.torch.cpu.packed_linear import PackedLinear
from penstock.executor.torch.cpu_kernels.kernels import Kernels
from penstock.executor.torch.fused_weights import LayerWeights, Projection, fuse_weights
from penstock.executor.torch.module_tree import DecoderTree
from penstock.executor.torch.prepacked_linear import PrepackedLinear, can_prepack
from penstock.executor.torch.rotary_table import RotaryTable, make_rotary_table

Linear = Callable[[Tensor], Tensor]
"""x [rows, in]; returns [rows, out]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedLayer:
    """One layer. `window` 0: none."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    output_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedModel:
    """What the fused step reads of a model. `eps` of all norms. `num_layer_weights`: of the first
    layer's products."""

    layers: tuple[FusedLayer, ...]
    embedding: Tensor
    head: Linear
    final_norm: Tensor
    eps: float
    num_heads: int
    head_dim: int
    scaling: float
    rotary: RotaryTable
    num_layer_weights: int


def pack_model(
    tree: DecoderTree, *, num_positions: int, kernels: Kernels, is_int8: bool
) -> FusedModel:
    """Join and pack the weights of a recognised model."""
    first = tree.layers[0]
    linears = (*first.qkv, first.out, *first.gate_up, first.down)
    num_layer_weights = sum(linear.weight.numel() for linear in linears)
    pack = _packing(tree.embedding.dtype, kernels, is_int8=is_int8)
    return FusedModel(
        layers=tuple(_layer(layer, pack) for layer in fuse_weights(tree)),
        embedding=tree.embedding,
        head=pack(Projection(weight=tree.head, bias=None)),
        final_norm=tree.final_norm,
        eps=tree.eps,
        num_heads=tree.num_heads,
        head_dim=tree.head_dim,
        scaling=tree.scaling,
        rotary=make_rotary_table(
            tree.inverse_frequencies,
            tree.rotary_scaling,
            num_positions=num_positions,
            device=tree.embedding.device,
        ),
        num_layer_weights=num_layer_weights,
    )


def num_packed_bytes(model: FusedModel) -> int:
    """Memory of the matrices that are packed for our own kernels."""
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    return sum(one.num_bytes for one in (*linears, model.head) if isinstance(one, PackedLinear))


def release_modules(tree: DecoderTree) -> None:
    """Give back what only the modules would read; shapes and dtypes stay readable."""
    linears = [
        linear
        for layer in tree.layers
        for linear in (*layer.qkv, layer.out, *layer.gate_up, layer.down)
    ]
    for linear in linears:
        linear.weight.data = linear.weight.data.new_zeros(1).expand(linear.weight.shape)


def _layer(layer: LayerWeights, pack: Callable[[Projection], Linear]) -> FusedLayer:
    return FusedLayer(
        qkv=pack(layer.qkv),
        out=pack(layer.out),
        gate_up=pack(layer.gate_up),
        down=pack(layer.down),
        input_norm=layer.input_norm,
        output_norm=layer.output_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        window=layer.window,
    )


def _packing(
    dtype: torch.dtype, kernels: Kernels, *, is_int8: bool
) -> Callable[[Projection], Linear]:
    """How a model of `dtype` has its products computed."""
    if is_int8:
        return partial(_pack, kernels, torch.int8)
    if dtype == torch.bfloat16 and kernels.has_fast_bf16_linear:
        return partial(_pack, kernels, torch.bfloat16)
    if dtype == torch.bfloat16 and can_prepack():
        return lambda projection: PrepackedLinear(projection.weight, projection.bias)
    # Of its own: what stands alone is still the module's parameter, whose memory will go.
    return lambda projection: partial(
        functional.linear, weight=projection.weight.detach(), bias=projection.bias
    )


def _pack(kernels: Kernels, dtype: torch.dtype, projection: Projection) -> Linear:
    return PackedLinear(kernels, projection.weight, projection.bias, dtype)
