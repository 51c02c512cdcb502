"""A linear layer of the fused step whose weights are in 8 bits.

Owns nothing but the call: the kernels compute, `Int8Matrix` holds.
"""

from torch import Tensor

from penstock.executor.torch.cpu_kernels.int8_matrix import Int8Matrix
from penstock.executor.torch.cpu_kernels.kernels import Kernels


class Int8Linear:
    """x @ weight^T + bias; the weight itself is not kept."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._matrix = Int8Matrix(weight, bias)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self._matrix.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in]; returns [rows, out]."""
        out = x.new_empty((len(x), self._matrix.num_outputs))
        self._kernels.int8_linear(x, self._matrix, out)
        return out
