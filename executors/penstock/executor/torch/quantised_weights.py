"""Weights in 8 bits: symmetric, one float32 scale for each output channel.

Owns the number formats and their rounding: a weight is `values[out, in] * scale[out]`. Multiplying
a product with the values by the scale gives the same result.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.executor.torch.fused_weights import LayerWeights, Projection
from penstock.executor.torch.module_tree import DecoderTree, LayerTree
from penstock.executor.torch.quantised_checkpoint import StoredWeight

FP8 = torch.float8_e4m3fn
_DTYPES = {"fp8": FP8, "int8": torch.int8}
_GREATEST = {FP8: 448.0, torch.int8: 127.0}


@torch.inference_mode()
def quantise(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """Return values [out, in] in 8 bits and their scales [out], for `weight` [out, in]."""
    dtype = _DTYPES[quantization]
    greatest = weight.abs().amax(1).float()
    scale = torch.where(greatest > 0, greatest / _GREATEST[dtype], 1.0)
    values = weight.float() / scale[:, None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


@torch.inference_mode()
def quantise_layers(
    tree: DecoderTree,
    layers: tuple[LayerWeights, ...],
    quantization: str,
    stored: dict[nn.Module, StoredWeight],
) -> tuple[LayerWeights, ...]:
    """Quantise the layers to 8 bits one by one; the tree's modules release their weights.

    `stored`: weights that a checkpoint already has in this format; they are used unchanged.
    """
    return tuple(
        _quantise_layer(names, layer, quantization, stored)
        for names, layer in zip(tree.layers, layers, strict=True)
    )


def _quantise_layer(
    names: LayerTree, layer: LayerWeights, quantization: str, stored: dict[nn.Module, StoredWeight]
) -> LayerWeights:
    def one(linears: tuple[nn.Linear, ...], projection: Projection) -> Projection:
        dtype, device = _DTYPES[quantization], projection.weight.device
        parts = [stored[linear] for linear in linears if linear in stored]
        if len(parts) == len(linears) and all(part.values.dtype == dtype for part in parts):
            values = torch.cat([part.values.to(device) for part in parts])
            scale = torch.cat([part.scale.to(device) for part in parts])
        else:
            values, scale = quantise(projection.weight, quantization)
        for linear in linears:
            linear.weight = nn.Parameter(projection.weight.new_empty(0), requires_grad=False)
        return replace(projection, weight=values, scale=scale)

    found = replace(
        layer,
        qkv=one(names.qkv, layer.qkv),
        out=one((names.out,), layer.out),
        gate_up=one(names.gate_up, layer.gate_up),
        down=one((names.down,), layer.down),
    )
    if found.qkv.weight.device.type == "cuda":
        torch.cuda.empty_cache()
    return found
