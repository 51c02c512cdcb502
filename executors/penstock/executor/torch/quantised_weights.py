"""8-bit weights: symmetric quantisation, one float32 scale per output channel.

A weight is `values[out, in] * scale[out]`. The scale may also be applied to the product, with the
same result up to rounding.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.torch.eight_bit_linear import in_parts, widen
from penstock.executor.torch.fused_weights import LayerWeights, Projection
from penstock.executor.torch.module_tree import DecoderTree, LayerTree

FP8 = torch.float8_e4m3fn
_DTYPES = {"fp8": FP8, "int8": torch.int8}
_GREATEST = {FP8: 448.0, torch.int8: 127.0}


@torch.inference_mode()
def quantise(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """Return values [out, in] in 8 bits and their scales [out], for `weight` [out, in];
    `quantization`: fp8 or int8.
    """
    dtype = _DTYPES[quantization]
    greatest = weight.abs().amax(1).float()
    scale = torch.where(greatest > 0, greatest / _GREATEST[dtype], 1.0)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for out, part, of_row in in_parts(values, weight, scale):
        exact = part.float() / of_row[:, None]
        out.copy_(exact.round_() if dtype == torch.int8 else exact)
    return values, scale


class WideLayers(Sequence[LayerWeights]):
    """A sequence of layers whose 8-bit weights are converted to `dtype` on each access."""

    def __init__(self, layers: Sequence[LayerWeights], dtype: torch.dtype) -> None:
        self._layers = layers
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:  # the overloads of Sequence.__getitem__
        layer = self._layers[index]
        return layer.with_products(_widen(one, self._dtype) for one in layer.products)


@torch.inference_mode()
def quantise_layers(tree: DecoderTree, layers: list[LayerWeights], quantization: str) -> None:
    """Quantise `layers` to 8 bits in place, one by one; release the original weights, also in the
    tree's modules.

    Weights that the checkpoint stores in this format are used unchanged.
    """
    for index, modules in enumerate(tree.layers):
        layers[index] = _quantise_layer(modules, layers[index], quantization, tree.embedding.dtype)


def _quantise_layer(
    modules: LayerTree, layer: LayerWeights, quantization: str, dtype: torch.dtype
) -> LayerWeights:
    def one(linears: tuple[nn.Linear, ...], projection: Projection) -> Projection:
        if projection.weight.dtype != _DTYPES[quantization]:
            weight, scale = quantise(_widen(projection, dtype).weight, quantization)
            projection = replace(projection, weight=weight, scale=scale)
        for linear in linears:
            linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        return projection

    found = layer.with_products(map(one, modules.products, layer.products))
    if found.qkv.weight.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _widen(projection: Projection, dtype: torch.dtype) -> Projection:
    if projection.scale is None:
        return projection
    wide = widen(projection.weight, projection.scale, dtype)
    return replace(projection, weight=wide, scale=None)
