"""The compiled kernels, called through ctypes, so that the GIL is released.

Contains the ctypes mirror of kernels.h, and checks the arguments because the C code does not:
methods raise ValueError for tensors that do not fit, and MemoryError if a kernel runs out of
memory.
"""

import ctypes
import hashlib
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.kv_pages import SCALE_BYTES

MAX_HEAD_DIM = 512
INT8_DIM_STEP = 16
"""Head sizes of 8-bit keys must be multiples of this, so that no vector load crosses into the next
row.
"""
DTYPES = (torch.bfloat16, torch.float32)

logger = logging.getLogger(__name__)
_FOLDER = Path(__file__).resolve().parent
_LIBRARY = _FOLDER / "_kernels.so"
_BUILD_HOOK = "hatch_build.py"
_CHECKOUT_DEPTH = 4
"""Number of folders between the checkout's root and this folder."""
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "attend": (_POINTER, _POINTER, *(_POINTER, _LONG, _LONG) * 2),
    "write": (_POINTER, _POINTER, *(_POINTER, _LONG, _LONG) * 2),
    "rotate_and_write": (*(_POINTER,) * 4, _LONG, _POINTER, _POINTER, _FLOAT),
    "add_rms_norm": (
        *(_POINTER, _LONG) * 2,
        *(_POINTER, _FLOAT, _POINTER),
        *(_LONG, _LONG, _LONG, ctypes.c_int),
    ),
    "silu_mul": (*(_POINTER, _LONG) * 2, _LONG, _LONG, ctypes.c_int),
    "argmax_rows": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, ctypes.c_int),
    "int8_linear": (
        *(_POINTER, _POINTER, _LONG, _LONG),
        *(_POINTER, _LONG, _LONG, ctypes.c_int),
    ),
    "bf16_linear": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG),
    "run_layers": (_POINTER, _POINTER, _POINTER, _LONG),
}
_CAN_FAIL = ("attend", "int8_linear", "run_layers")
_NUM_BARRIERS = 32


class _CAttention(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bf16", ctypes.c_int64),
        ("is_int8", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class _Rotary(ctypes.Structure):
    _fields_ = (
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library of the compiled kernels. If it was not built from the current sources of a
    checkout, log a warning.

    Returns None if the kernels are not built, or if torch's OpenMP library lacks a function that
    they need.
    """
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return None
    library.penstock_supports.argtypes = (ctypes.c_char_p,)
    library.penstock_barrier_us.argtypes = (ctypes.c_int,)
    library.penstock_barrier_us.restype = ctypes.c_double
    hook = _FOLDER.parents[_CHECKOUT_DEPTH] / _BUILD_HOOK
    if hook.is_file() and _digest_of(library) != digest_of_sources(hook):
        logger.warning(
            "the compiled CPU kernels are older than their sources and may be slow or wrong:"
            " run `python %s`",
            hook,
        )
    return library


def digest_of_sources(hook: Path) -> str:
    """Return the digest of a checkout's kernel sources and of `hook`, the file of its build hook.
    The build hook stores the same digest in the library that it builds.
    """
    files = (hook, *sorted((_FOLDER / "csrc").iterdir()))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def is_supported(instructions: str) -> bool:
    """Return whether the kernels include this instruction set and the processor has it."""
    library = load_library()
    if library is None or not hasattr(library, f"penstock_attend_{instructions}"):
        return False
    return bool(library.penstock_supports(instructions.encode()))


def source_digest() -> str | None:
    """Return the digest of the sources that the library was built from; None without a library."""
    library = load_library()
    return None if library is None else _digest_of(library)


def _digest_of(library: ctypes.CDLL) -> str:
    return bytes((ctypes.c_char * 16).in_dll(library, "penstock_source_digest")).decode()


class NativeKernels:
    """The operators of `Kernels` in compiled C, for one instruction set."""

    is_native = True

    def __init__(self, instructions: str) -> None:
        self.instructions = instructions
        library: Any = load_library()
        self._library = library
        # With bfloat16 instructions, oneDNN is as fast for many rows; without them, it is slower
        # for any number of rows. The baseline instruction set was not measured.
        self.has_fast_bf16_linear = instructions != "baseline"
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"penstock_{name}_{instructions}")
            function.argtypes = arguments
            function.restype = ctypes.c_int if name in _CAN_FAIL else None
            setattr(self, f"_{name}", function)
        self._attend: Any
        self._write: Any
        self._rotate_and_write: Any
        self._add_rms_norm: Any
        self._silu_mul: Any
        self._argmax_rows: Any
        self._int8_linear: Any
        self._bf16_linear: Any
        self._run_layers: Any

    def barrier_us(self) -> float:
        """Measure and return the duration of a thread barrier in microseconds."""
        measured: float = self._library.penstock_barrier_us(_NUM_BARRIERS)
        return measured

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
    ) -> "NativeLayer":
        """Return the attention operators of a layer, bound to its KV pages; see `Kernels.layer`."""
        dtype = dtype or pages.dtype
        functions = self._attend, self._write, self._rotate_and_write
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        is_int8 = pages.dtype is torch.int8
        head_dim = pages.shape[4] - (SCALE_BYTES if is_int8 else 0)
        struct = _CAttention(
            pages=pages.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            num_heads=num_heads,
            num_kv_heads=pages.shape[2],
            head_dim=head_dim,
            block_size=pages.shape[3],
            window=window,
            scaling=scaling,
            softcap=softcap,
            is_bf16=_is_bf16(dtype),
            is_int8=is_int8,
            row_bytes=pages.shape[4] * pages.itemsize,
        )
        if not pages.is_contiguous() or pages.device.type != "cpu":
            raise ValueError("pages are contiguous and on the CPU")
        if pages.dtype not in (dtype, torch.int8):
            raise ValueError(f"pages of {pages.dtype} for queries of {dtype}")
        if is_int8 and head_dim % INT8_DIM_STEP:
            raise ValueError(f"8-bit keys of {head_dim} elements, no multiple of {INT8_DIM_STEP}")
        if head_dim > MAX_HEAD_DIM or num_heads % pages.shape[2]:
            raise ValueError(f"{num_heads} query heads over pages of {tuple(pages.shape)}")
        if sinks is not None and len(sinks) != num_heads:
            raise ValueError(f"{len(sinks)} sinks for {num_heads} query heads")
        return NativeLayer(functions, struct, dtype, (pages, sinks))

    def add_rms_norm(
        self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """Compute residual [T, N] += added (unless None); out = its root mean square norm times
        `weight` [N].
        """
        shape, dtype = residual.shape, residual.dtype
        is_bf16 = _is_bf16(dtype)
        added_at, added_stride = None, 0
        if added is not None:
            added_at, added_stride = added.data_ptr(), _row_stride(added, shape, dtype)
        if weight.shape != shape[1:] or weight.dtype is not dtype or weight.stride(0) != 1:
            raise ValueError("weight does not fit residual")
        self._add_rms_norm(
            *(residual.data_ptr(), _row_stride(residual, shape, dtype), added_at, added_stride),
            *(weight.data_ptr(), eps, out.data_ptr(), _row_stride(out, shape, dtype)),
            *(*shape, is_bf16),
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Compute out [T, F] = silu(first half) * second half of gate_up [T, 2 F]."""
        (num_rows, size), dtype = out.shape, out.dtype
        gate_up_stride = _row_stride(gate_up, (num_rows, 2 * size), dtype)
        self._silu_mul(
            *(
                gate_up.data_ptr(),
                gate_up_stride,
                out.data_ptr(),
                _row_stride(out, out.shape, dtype),
            ),
            *(num_rows, size, _is_bf16(dtype)),
        )

    def argmax_rows(
        self, logits: Tensor, out: NDArray[np.int32], is_finite: NDArray[np.bool_]
    ) -> None:
        """Write the lowest index of each row's maximum, and whether it is finite: see
        `Kernels.argmax_rows`.
        """
        num_rows, size = logits.shape
        if out.dtype != np.int32 or is_finite.itemsize != 1:
            raise ValueError("out is int32, is_finite a byte each")
        if len(out) != num_rows or len(is_finite) != num_rows:
            raise ValueError("out or is_finite does not fit logits")
        if not (out.flags.c_contiguous and is_finite.flags.c_contiguous):
            raise ValueError("out and is_finite are contiguous")
        self._argmax_rows(
            *(logits.data_ptr(), _row_stride(logits, logits.shape, logits.dtype), num_rows, size),
            *(out.ctypes.data, is_finite.ctypes.data, _is_bf16(logits.dtype)),
        )

    def bf16_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias; x, matrix and out are
        bfloat16.
        """
        num_rows, dtype = len(x), torch.bfloat16
        if matrix.dtype is not dtype:
            raise ValueError(f"a matrix in {matrix.dtype}")
        self._bf16_linear(
            matrix.address,
            *(x.data_ptr(), _row_stride(x, (num_rows, matrix.num_inputs), dtype)),
            *(out.data_ptr(), _row_stride(out, (num_rows, matrix.num_outputs), dtype)),
            num_rows,
        )

    def int8_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias; each row of x is quantised
        to 8 bits.
        """
        num_rows, dtype = len(x), x.dtype
        if matrix.dtype is not torch.int8:
            raise ValueError(f"a matrix in {matrix.dtype}")
        failed = self._int8_linear(
            matrix.address,
            *(x.data_ptr(), _row_stride(x, (num_rows, matrix.num_inputs), dtype)),
            matrix.num_inputs,
            *(out.data_ptr(), _row_stride(out, (num_rows, matrix.num_outputs), dtype)),
            *(num_rows, _is_bf16(dtype)),
        )
        if failed:
            raise MemoryError("a product with 8-bit weights: out of memory")

    def run_layers(self, decoder: int, rows: StepRows, activations: int, num_tokens: int) -> None:
        """Run all layers of a decoder. `decoder`, `activations`: addresses of the C structures that
        `NativeDecoder` creates. Raises MemoryError if a kernel runs out of memory.
        """
        if self._run_layers(decoder, rows.address, activations, num_tokens):
            raise MemoryError("a step: out of memory")


class NativeLayer:
    """The attention of one layer in compiled C: a `LayerAttention`."""

    def __init__(
        self,
        functions: tuple[Any, Any, Any],
        struct: _CAttention,
        dtype: torch.dtype,
        kept: tuple[Tensor, Tensor | None],
    ) -> None:
        self._attend, self._write, self._rotate_and_write = functions
        self._struct = struct
        self._address = ctypes.addressof(struct)
        self._kept = kept
        self._dtype = dtype
        self._queries = (int(struct.num_heads), int(struct.head_dim))
        self._keys = (int(struct.num_kv_heads), int(struct.head_dim))
        self._rotary: tuple[Tensor, Tensor, _Rotary] | None = None

    @property
    def address(self) -> int:
        """Address of the C structure."""
        return self._address

    @property
    def widths(self) -> tuple[int, int]:
        """Number of elements that one token has in its queries, and in its queries, keys and values
        together.
        """
        (num_heads, dim), (num_kv_heads, _) = self._queries, self._keys
        return num_heads * dim, (num_heads + 2 * num_kv_heads) * dim

    def write(self, rows: StepRows, key: Tensor, value: Tensor) -> None:
        """Write new keys and values [T, H, D] to the pages."""
        self._write(
            self._address,
            rows.address,
            *self._heads(key, self._keys, rows),
            *self._heads(value, self._keys, rows),
        )

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
        """Normalise and rotate queries and keys of qkv [T, (Hq + 2 H) * D]; write keys and values.

        Queries change in place, keys and values are written to the pages. See `LayerAttention`.
        """
        stride = _row_stride(qkv, (rows.num_tokens, self.widths[1]), self._dtype)
        rotary = self.rotary_address(cosines, sines)
        self.check_norms(query_norm, key_norm)
        self._rotate_and_write(
            self._address,
            rows.address,
            rotary,
            qkv.data_ptr(),
            stride,
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            eps,
        )

    def attend(self, rows: StepRows, query: Tensor, out: Tensor) -> None:
        """Attend with query [T, Hq, D] to the keys and values in the pages, into out [T, Hq, D]."""
        failed = self._attend(
            self._address,
            rows.address,
            *self._heads(query, self._queries, rows),
            *self._heads(out, self._queries, rows),
        )
        if failed:
            raise MemoryError("attention: out of memory")

    def rotary_address(self, cosines: Tensor, sines: Tensor) -> int:
        """Return the address of the C structure `Rotary` for these tables. The address is valid
        until a call with other tables.

        Raises ValueError if the tables do not fit the head size.
        """
        if self._rotary is None or self._rotary[0] is not cosines or self._rotary[1] is not sines:
            self._rotary = cosines, sines, self._checked_rotary(cosines, sines)
        return ctypes.addressof(self._rotary[2])

    def check_norms(self, *norms: Tensor | None) -> None:
        """Raise ValueError unless each tensor is None or a valid QK-norm weight, [head_dim]."""
        for norm in norms:
            if norm is not None and (
                norm.shape != self._queries[1:] or norm.dtype != self._dtype or norm.stride(0) != 1
            ):
                raise ValueError("a norm's weight does not fit a head")

    def _heads(
        self, tensor: Tensor, heads: tuple[int, int], rows: StepRows
    ) -> tuple[int, int, int]:
        token, head, element = tensor.stride()
        if tensor.shape != (rows.num_tokens, *heads) or tensor.dtype is not self._dtype:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} of {rows.num_tokens} tokens")
        if element != 1:
            raise ValueError("the last dimension is not dense")
        return tensor.data_ptr(), token, head

    def _checked_rotary(self, cosines: Tensor, sines: Tensor) -> _Rotary:
        size = 2 * cosines.shape[1]
        for table in (cosines, sines):
            if table.dtype != torch.float32 or not table.is_contiguous():
                raise ValueError("cosines and sines are contiguous float32")
        if cosines.shape != sines.shape or size > self._queries[1]:
            raise ValueError(f"a rotation of {size} of {self._queries[1]} elements")
        return _Rotary(cosines=cosines.data_ptr(), sines=sines.data_ptr(), size=size)


def _is_bf16(dtype: torch.dtype) -> bool:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: kernels compute in bfloat16 and float32")
    return dtype is torch.bfloat16


def _row_stride(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the row stride of a matrix, in elements.

    Raises ValueError unless it has this shape and dtype, and contiguous rows.
    """
    stride, element = tensor.stride()
    if tensor.shape != shape or tensor.dtype is not dtype or element != 1:
        raise ValueError(
            f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            f" is no {dtype} {tuple(shape)} with dense rows"
        )
    return stride
