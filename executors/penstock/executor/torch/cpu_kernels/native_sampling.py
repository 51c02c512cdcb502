"""Samples with the compiled kernels, for logits on a CPU.

Without compiled kernels, or for another number format, the sampler uses PyTorch. Both give the same
tokens, unless a random number is so close to the boundary between two tokens that the rounding of
exponentials (about 1e-6 of the total mass) decides.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cpu_kernels.kernels import Kernels, load
from penstock.executor.torch.cpu_kernels.native import DTYPES, load_library

SAMPLING_OPTIONS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("uniform", np.float64),
    ]
)
"""The sampling options of a row and its random number in [0, 1), in the layout of sampling.c."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """The chosen tokens. `tokens` int32 [m]; `is_good` bool [m]: False if the row's logits are not
    finite.
    """

    tokens: NDArray[np.int32]
    is_good: NDArray[np.bool_]


def can_sample(logits: Tensor) -> bool:
    """Return whether `choose_greatest` and `draw_rows` support these logits."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and _functions() is not None


def choose_greatest(logits: Tensor) -> Chosen:
    """Return, for every row, the token id with the greatest logit, the lowest id among equal
    logits. Requires `can_sample`.
    """
    chosen = _empty_choice(len(logits))
    kernels, _ = _loaded()
    kernels.argmax_rows(logits, chosen.tokens, chosen.is_good)
    return chosen


def draw_rows(logits: Tensor, rows: NDArray[np.int64], options: NDArray[np.void]) -> Chosen:
    """Sample a token for each of `rows` [m] of `logits`; `options` [m]: the rows' sampling options,
    of dtype SAMPLING_OPTIONS. Requires `can_sample`. Raises ValueError or IndexError for arguments
    that do not fit the logits, MemoryError if the kernel runs out of memory.
    """
    if logits.stride(1) != 1 or options.dtype != SAMPLING_OPTIONS or len(options) != len(rows):
        raise ValueError("logits, rows and sampling options do not match")
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
        raise IndexError("a row outside the logits")
    chosen = _empty_choice(len(rows))
    rows, options = np.ascontiguousarray(rows), np.ascontiguousarray(options)
    _, sample = _loaded()
    failed = sample(
        *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
        *(rows.ctypes.data, options.ctypes.data, len(rows)),
        *(chosen.tokens.ctypes.data, chosen.is_good.ctypes.data),
        logits.dtype == torch.bfloat16,
    )
    if failed:
        raise MemoryError("sampling: out of memory")
    return chosen


def _empty_choice(num_rows: int) -> Chosen:
    return Chosen(
        tokens=np.empty(num_rows, dtype=np.int32), is_good=np.empty(num_rows, dtype=np.bool_)
    )


def _loaded() -> tuple[Kernels, Any]:
    functions = _functions()
    if functions is None:
        raise RuntimeError("no compiled kernels")
    return functions


@cache
def _functions() -> tuple[Kernels, Any] | None:
    """Return the kernels and the C function `sample_rows`, or None if they are not compiled."""
    kernels, library = load(), load_library()
    if not kernels.is_native:
        return None
    sample = getattr(library, f"penstock_sample_rows_{kernels.instructions}")
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    sample.argtypes = (
        *(pointer, long, long, pointer, pointer, long),
        *(pointer, pointer, ctypes.c_int),
    )
    sample.restype = ctypes.c_int
    return kernels, sample
