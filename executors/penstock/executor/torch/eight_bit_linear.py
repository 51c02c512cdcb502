"""A linear layer with an 8-bit weight and one scale per output channel.

Used only while a model loads: its forward pass converts the weight on each call, so that the load
checks need memory for only one weight in the wider dtype.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

_NUM_ROWS = 1024
"""Number of rows that are converted at a time."""


class EightBitLinear(nn.Linear):
    """A replacement for the layer `linear`: the same bias, but `weight` [out, in] in 8 bits, with
    `scale` float32 [out].
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor, scale: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scale", scale)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Apply the layer to `input` [..., in]; return [..., out] in the same number format."""
        return functional.linear(input, wide_weight(self, input.dtype), self.bias)


def wide_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] of a linear layer, 8-bit or not, in `dtype`."""
    if isinstance(linear, EightBitLinear):
        return widen(linear.weight, linear.scale, dtype)
    return linear.weight.to(dtype)


def widen(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [out, in] times scale [out] in `dtype`, rounded once."""
    wide = torch.empty(values.shape, dtype=dtype, device=values.device)
    for out, part, of_row in in_parts(wide, values, scale):
        out.copy_(part.float().mul_(of_row[:, None]))
    return wide


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tuples with the same slice of rows of each tensor, at most _NUM_ROWS rows at a time, so
    that a float32 copy of a slice is small compared with a weight.
    """
    return zip(*(tensor.split(_NUM_ROWS) for tensor in tensors), strict=True)
