"""A linear layer of the fused step over weights packed for our own kernels."""

import torch
from torch import Tensor

from penstock.executor.torch.cpu_kernels.kernels import Kernels
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix


class PackedLinear:
    """x @ weight^T + bias, of weights in `dtype`; the unpacked weight is not kept."""

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._multiply = kernels.int8_linear if dtype is torch.int8 else kernels.bf16_linear
        self.matrix = PackedMatrix(weight, bias, dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self.matrix.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in]; returns [rows, out]."""
        out = x.new_empty((len(x), self.matrix.num_outputs))
        self._multiply(x, self.matrix, out)
        return out
