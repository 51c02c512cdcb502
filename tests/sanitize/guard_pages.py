"""Runs products of packed matrices whose memory lies between inaccessible pages, with every
instruction set of this processor. An access outside a matrix ends the process with SIGSEGV; the
last line of the output names the product.

    python -X faulthandler tests/sanitize/guard_pages.py

This finds what sanitizers do not: wrong accesses of tiles (AMX), which are inline assembly.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

import torch
from torch import Tensor

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import load
from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix

ROWS = (1, 16, 49, 100)
SHAPES = ((576, 70), (30, 16))
"""Input and output sizes: whole tiles in several blocks of inputs, and less than a tile."""
_NO_ACCESS = 0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def between_guards(tensor: Tensor, *, at_end: bool) -> Tensor:
    """Return a copy of the tensor between two inaccessible pages: its end touches the second page
    if `at_end` is set, otherwise its start touches the first one.
    """
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    offset = mmap.PAGESIZE + (size - tensor.nbytes if at_end else 0)
    room = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    found = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    start = found.data_ptr() - offset
    for guard in (start, start + mmap.PAGESIZE + size):
        if _LIBC.mprotect(guard, mmap.PAGESIZE, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found.view(tensor.shape).copy_(tensor)


def multiply(
    instructions: str, dtype: torch.dtype, shape: tuple[int, int], num_rows: int, *, at_end: bool
) -> None:
    """Compute one product whose inputs, matrix and result lie between guard pages."""
    num_inputs, num_outputs = shape
    matrix = PackedMatrix(torch.randn(num_outputs, num_inputs), torch.randn(num_outputs), dtype)
    parts = {"packed": matrix.packed, "bias": matrix.bias}
    if dtype is torch.int8:
        parts |= {"scales": matrix.scales, "offsets": matrix._offsets}
    kept = {name: between_guards(part, at_end=at_end) for name, part in parts.items()}
    for name, part in kept.items():
        setattr(matrix._struct, name, part.data_ptr())
    x = between_guards(torch.randn(num_rows, num_inputs).bfloat16(), at_end=at_end)
    out = between_guards(torch.zeros(num_rows, num_outputs).bfloat16(), at_end=at_end)
    kernels = load(instructions)
    (kernels.int8_linear if dtype is torch.int8 else kernels.bf16_linear)(x, matrix, out)


def main() -> None:
    torch.set_num_threads(1)
    sets = filter(native.is_supported, INSTRUCTION_SETS)
    cases = itertools.product(sets, (torch.bfloat16, torch.int8), SHAPES, ROWS, (False, True))
    for instructions, dtype, shape, num_rows, at_end in cases:
        side = "end" if at_end else "start"
        print(instructions, dtype, *shape, num_rows, f"guard at the {side}", flush=True)
        multiply(instructions, dtype, shape, num_rows, at_end=at_end)


if __name__ == "__main__":
    main()
