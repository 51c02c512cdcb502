"""Joins the weights of the fused step (the forward pass with Penstock's kernels): projections with
a common input become one matrix.

The modules keep views of the joined matrices, so weights are stored once and the eager path with
the same modules still works.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.executor.torch.decoder_layer import DecoderLayer
from penstock.executor.torch.eight_bit_linear import EightBitLinear, wide_weight
from penstock.executor.torch.module_tree import DecoderTree, LayerTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A linear layer's weights: `weight` [out, in]; `bias` [out] or None.

    `scale` float32 [out]: one per output channel of an 8-bit weight, else None. `wide` [out, in]:
    buffer for the converted int8 weight, shared by all layers, or None. `transposed`: a view of the
    weight, [in, out].
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    wide: Tensor | None = None
    transposed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transposed", self.weight.t())


LayerWeights: TypeAlias = DecoderLayer[Projection]


@torch.inference_mode()
def fuse_weights(tree: DecoderTree) -> list[LayerWeights]:
    """Return the layers with joined weights. They are joined layer by layer, so that at most one
    layer's weights are in memory twice.
    """
    return [_fuse_layer(layer, tree.embedding.dtype) for layer in tree.layers]


def _fuse_layer(layer: LayerTree, dtype: torch.dtype) -> LayerWeights:
    fused = layer.with_products(_join(linears, dtype) for linears in layer.products)
    if fused.qkv.weight.device.type == "cuda":
        # Return freed memory: it is fragmented, and the next, larger matrix does not fit into it.
        torch.cuda.empty_cache()
    return fused


def _join(linears: tuple[nn.Linear, ...], dtype: torch.dtype) -> Projection:
    """Join linear layers. If all have the same 8-bit format, the result keeps it; otherwise it is
    in `dtype`. Where possible, the layers get views of the joined weight and bias.
    """
    parts = [linear for linear in linears if isinstance(linear, EightBitLinear)]
    is_narrow = len(parts) == len(linears) and len({part.weight.dtype for part in parts}) == 1
    if len(linears) == 1:
        scale = parts[0].scale if is_narrow else None
        return Projection(weight=linears[0].weight, bias=linears[0].bias, scale=scale)
    scale = torch.cat([part.scale for part in parts]) if is_narrow else None
    weight = torch.cat(
        [linear.weight if is_narrow else wide_weight(linear, dtype) for linear in linears]
    )
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    bias = None
    if any(part is not None for part in biases):
        bias = torch.cat(
            [
                torch.zeros(linear.out_features, dtype=dtype, device=weight.device)
                if part is None
                else part
                for linear, part in zip(linears, biases, strict=True)
            ]
        )
    first = 0
    for linear in linears:
        rows = slice(first, first + linear.out_features)
        # The forward pass of an EightBitLinear would scale the weight again.
        if is_narrow or not isinstance(linear, EightBitLinear):
            linear.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            # A linear layer without a bias gets zeros, which do not change its results.
            linear.bias = nn.Parameter(bias[rows], requires_grad=False)
        first = rows.stop
    return Projection(weight=weight, bias=bias, scale=scale)
