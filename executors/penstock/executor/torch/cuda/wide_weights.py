"""Converts an int8 weight to the model's dtype, for products that the kernel `split_projection`
does not support (more than 128 rows, or other shapes; see `split_tile`).

A weight is converted immediately before its product, so all layers share the memory of the
converted weight.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.executor.torch.cuda.fixed_kernel import FixedKernel
from penstock.executor.torch.cuda.kernels.eight_bit import widen_weight
from penstock.executor.torch.fused_weights import LayerWeights, Projection

_PART = 2048
"""Elements of a weight's row per program."""


def with_wide_memory(
    layers: Sequence[LayerWeights], dtype: torch.dtype
) -> tuple[LayerWeights, ...]:
    """Return the int8 `layers` with a shared `wide` buffer in their projections.

    The buffer has the size of the largest weight in `dtype`.
    """
    first = layers[0]
    num_elements = max(one.weight.numel() for one in first.products)
    memory = torch.empty(num_elements, dtype=dtype, device=first.qkv.weight.device)

    def wide(projection: Projection) -> Projection:
        weight = projection.weight
        return replace(projection, wide=memory[: weight.numel()].view(weight.shape))

    return tuple(layer.with_products(map(wide, layer.products)) for layer in layers)


class WeightWidener:
    """Converts the int8 weights of one model to the model's dtype, on the current CUDA stream."""

    def __init__(self) -> None:
        self._kernels: dict[int, FixedKernel] = {}

    def widen(self, projection: Projection) -> Tensor:
        """Queue the multiplication of the 8-bit weight by its scales, into the `wide` buffer;
        return a view of the buffer, [in, out]. It is valid until the next call, because all
        projections share the buffer. Raises ValueError if the projection has no scales or no
        buffer.
        """
        weight, scale, wide = projection.weight, projection.scale, projection.wide
        if scale is None or wide is None:
            raise ValueError("the weight has no memory for another number format")
        num_out, num_in = weight.shape
        kernel = self._kernels.get(num_in)
        if kernel is None:
            kernel = FixedKernel(widen_weight, num_in=num_in, part=_PART, num_warps=4)
            self._kernels[num_in] = kernel
        kernel.launch((num_out, -(-num_in // _PART), 1), (weight, scale, wide))
        return wide.t()
