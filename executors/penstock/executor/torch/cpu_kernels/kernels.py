"""The interfaces of the CPU kernels, and the choice of an implementation.

All tensors are on the CPU. The tensors of one call are all bfloat16 or all float32, except 8-bit
pages and weights and the float32 tables of rotary embeddings. Their last dimension is contiguous,
the others may have any stride; pages are contiguous.
"""

import logging
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels.native import NativeKernels, is_supported
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.plain import PlainKernels
from penstock.executor.torch.cpu_kernels.step_rows import StepRows

AUTO, PLAIN = "auto", "none"
_chosen = AUTO

logger = logging.getLogger(__name__)


class LayerAttention(Protocol):
    """One layer's attention over its pages. Shapes: D head size, H key heads, Hq query heads, T
    tokens.
    """

    def write(self, rows: StepRows, key: Tensor, value: Tensor) -> None:
        """Write new keys and values [T, H, D] to the pages."""
        ...

    def rotate_and_write(
        self,
        rows: StepRows,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Normalise and rotate the queries and keys of qkv [T, (Hq + 2 H) * D]; write keys and
        values.

        Queries change in place; keys and values are written to the pages (values are not rotated).
        The norm weights are [D], None for no norm. `cosines`, `sines` float32 [positions, R / 2]
        rotate the first R elements of a head (half-split layout).
        """
        ...

    def attend(self, rows: StepRows, query: Tensor, out: Tensor) -> None:
        """Attend with query [T, Hq, D] to the keys and values in the pages, into out [T, Hq, D].

        Reads only the keys and values that a row attends to.
        """
        ...


class Kernels(Protocol):
    """The operators of a step in one implementation: compiled C or PyTorch."""

    @property
    def is_native(self) -> bool:
        """True if the kernels are compiled, False for PyTorch."""
        ...

    @property
    def instructions(self) -> str:
        """Name of the instruction set, or PLAIN."""
        ...

    def layer(
        self,
        pages: Tensor,
        *,
        num_heads: int,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> LayerAttention:
        """Return the attention operators of one layer, bound to its KV `pages` (see
        `KVPages.layer`). Does not compute attention.

        `dtype`: the format of the queries; None: the format of the pages. `num_heads`: number of
        query heads. See `Scoring` for the other arguments.
        """
        ...

    def add_rms_norm(
        self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """Compute residual [T, N] += added (unless None); out = its root mean square norm times
        `weight` [N].
        """
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Compute out [T, F] = silu(first half) * second half of gate_up [T, 2 F]."""
        ...

    def barrier_us(self) -> float:
        """Measure the duration of a thread barrier, in microseconds.

        Typically 1 or 2 on dedicated cores, more if other processes use the cores.
        """
        ...

    @property
    def has_fast_bf16_linear(self) -> bool:
        """True if measurements with this instruction set show that `bf16_linear` is at least as
        fast as oneDNN's bfloat16 product, for any number of rows.
        """
        ...

    def int8_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias.

        Every row of x is quantised to 8 bits with its own scale, so a row's result depends only on
        that row. A row with a non-finite value gives NaN.
        """
        ...

    def bf16_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias; x, matrix and out are
        bfloat16.
        """
        ...

    def argmax_rows(
        self, logits: Tensor, out: NDArray[np.int32], is_finite: NDArray[np.bool_]
    ) -> None:
        """Write the lowest index of each row's maximum to `out`, and True to `is_finite`.

        A row with NaN or plus infinity, or with only minus infinity, gets 0 and False.
        """
        ...


def choose(name: str) -> None:
    """Choose the kernels that `load` returns by default in this process."""
    global _chosen
    _chosen = name


def load(name: str | None = None) -> Kernels:
    """Return the kernels for `name`: an instruction set, PLAIN for the PyTorch kernels, or AUTO for
    the best instruction set of this machine, or the PyTorch kernels if none is compiled.

    The default is the name passed to `choose`, else AUTO. Raises ValueError for an instruction set
    that the compiled kernels or the machine do not support.
    """
    name = name or _chosen
    if name == PLAIN:
        return PlainKernels()
    for one in INSTRUCTION_SETS:
        if name in (AUTO, one) and is_supported(one):
            return NativeKernels(one)
    if name != AUTO:
        raise ValueError(f"cpu_kernels {name} does not run here")
    warn_without_kernels()
    return PlainKernels()


@cache
def warn_without_kernels() -> None:
    """Log, once per process, that there are no compiled kernels."""
    logger.warning("no compiled CPU kernels: attention runs in PyTorch's operators")
