"""A linear layer whose weights are packed for the CPU kernels."""

import torch
from torch import Tensor

from penstock.executor.torch.cpu_kernels.kernels import Kernels
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix

_MATRIX = 2
"""Number of dimensions of a matrix."""


class PackedLinear:
    """Computes x @ weight^T + bias with a weight packed in `dtype`; does not keep the unpacked
    weight.
    """

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._multiply = kernels.int8_linear if dtype is torch.int8 else kernels.bf16_linear
        self.matrix = PackedMatrix(weight, bias, dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the packed matrix, in bytes."""
        return self.matrix.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        out = x.new_empty((*x.shape[:-1], self.matrix.num_outputs))
        rows, to = (x, out) if x.dim() == _MATRIX else (x.flatten(0, -2), out.flatten(0, -2))
        self._multiply(rows, self.matrix, to)
        return out
