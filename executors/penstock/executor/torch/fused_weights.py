"""Joins the weights of the fused step: projections with a common input become one matrix.

The modules keep views of the joined matrices, so nothing is stored twice and the eager path over
the same modules is unchanged.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.executor.torch.module_tree import DecoderTree, LayerTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """`weight` [out, in], `bias` [out] or None.

    `scale` float32 [out]: one per output channel of an 8-bit weight, else None. `transposed`: a
    view of the weight, [in, out].
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    transposed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transposed", self.weight.t())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """The weights of one layer. `window` 0: no sliding window."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    input_norm: Tensor
    output_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int


@torch.inference_mode()
def fuse_weights(tree: DecoderTree) -> tuple[LayerWeights, ...]:
    """Join the weights layer by layer, so that at most one layer is in memory twice."""
    return tuple(_fuse_layer(layer) for layer in tree.layers)


def _fuse_layer(layer: LayerTree) -> LayerWeights:
    fused = LayerWeights(
        qkv=_join(layer.qkv),
        out=_join((layer.out,)),
        gate_up=_join(layer.gate_up),
        down=_join((layer.down,)),
        input_norm=layer.input_norm,
        output_norm=layer.output_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        window=layer.window,
    )
    if fused.qkv.weight.device.type == "cuda":
        # The freed memory is fragmented: the next, longer matrix does not fit into it.
        torch.cuda.empty_cache()
    return fused


def _join(linears: tuple[nn.Linear, ...]) -> Projection:
    if len(linears) == 1:
        return Projection(weight=linears[0].weight, bias=linears[0].bias)
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    bias = None
    if any(part is not None for part in biases):
        bias = torch.cat(
            [
                weight.new_zeros(linear.out_features) if part is None else part
                for linear, part in zip(linears, biases, strict=True)
            ]
        )
    first = 0
    for linear in linears:
        rows = slice(first, first + linear.out_features)
        linear.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            # A linear without a bias gets zeros: the same results.
            linear.bias = nn.Parameter(bias[rows], requires_grad=False)
        first = rows.stop
    return Projection(weight=weight, bias=bias)
