"""The interfaces of the CPU kernels, and the choice of an implementation.

Tensors of one call are all bfloat16 or all float32 and on the CPU; their last dimension is dense,
the others may have any stride.
"""

import logging
import os
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cpu_kernels.native import INSTRUCTION_SETS, NativeKernels, is_supported
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.plain import PlainKernels
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.thread_environment import KERNELS_VARIABLE

PLAIN = "none"

_LOG = logging.getLogger(__name__)


class LayerAttention(Protocol):
    """One layer's attention over its pages. D is the head size, H key heads, Hq query heads."""

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
        """Norm (weights [D] or None) and rotate by halves the queries and keys of qkv [T, (Hq + 2
        H) * D]: queries in place, keys while they are written to the pages. Values are written
        unchanged.

                cosines, sines float32 [positions, R / 2] for the first R elements of a head.
        """
        ...

    def attend(self, rows: StepRows, query: Tensor, out: Tensor) -> None:
        """Attend with query [T, Hq, D], write to out [T, Hq, D]. Reads keys and values only from
        the pages, and nothing of a page that no row sees.
        """
        ...


class Kernels(Protocol):
    """The operations of a step other than its matrix products."""

    @property
    def is_native(self) -> bool:
        """True for compiled code."""
        ...

    @property
    def instructions(self) -> str:
        """The instruction set, or PLAIN."""
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
        """Return attention over pages as `KVPages.layer` returns them. `dtype`: of the queries,
        None for the pages' own; see `Scoring` for the other arguments.
        """
        ...

    def add_rms_norm(
        self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [T, N] += added; out = its root mean square norm times `weight` [N]."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """gate_up [T, 2 F]: out [T, F] = silu(first half) * second half."""
        ...

    def barrier_us(self) -> float:
        """Measure and return the microseconds of a barrier between two operators, over some tens of
        barriers: 1 or 2 on dedicated cores, many when other processes compute too.
        """
        ...

    @property
    def has_fast_bf16_linear(self) -> bool:
        """True when `bf16_linear` is the fastest product here, for any number of rows."""
        ...

    def int8_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """out [T, O] = x [T, I] times the matrix. Each row of x is quantised to 8 bits with its own
        scale, so a row's result depends only on that row. NaN where a row is not finite.
        """
        ...

    def bf16_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """As `int8_linear`, with matrix, x and out in bfloat16."""
        ...

    def argmax_rows(
        self, logits: Tensor, out: NDArray[np.int32], is_finite: NDArray[np.bool_]
    ) -> None:
        """Write the lowest index of each row's maximum; 0 and False for a row with NaN or plus
        infinity, or with only minus infinity.
        """
        ...


def load(name: str | None = None) -> Kernels:
    """Return the kernels of the best instruction set of this machine, or of `name`; kernels in
    plain torch if the shared object is missing, or for PLAIN. PENSTOCK_CPU_KERNELS sets the name
    for a process.

    Raises ValueError for a name that this machine does not support.
    """
    name = name or os.environ.get(KERNELS_VARIABLE) or None
    if name == PLAIN:
        return PlainKernels()
    for one in INSTRUCTION_SETS:
        if name in (None, one) and is_supported(one):
            return NativeKernels(one)
    if name is not None:
        raise ValueError(f"{KERNELS_VARIABLE} {name!r} does not run here")
    warn_without_kernels()
    return PlainKernels()


@cache
def warn_without_kernels() -> None:
    """Log, once per process, that there are no compiled kernels."""
    _LOG.warning("no compiled CPU kernels: attention runs in PyTorch's operators")
