"""The CPU kernels in PyTorch, row by row: the reference for tests of the compiled kernels.

The executor does not run them: without compiled kernels, it uses the tensor operations of
`paged_attention`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.executor.torch.cpu_kernels.packed_matrix import PackedMatrix
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.kv_pages import SCALE_BYTES


class PlainKernels:
    """The operators of `Kernels` in PyTorch: slow, the reference for the compiled ones."""

    is_native = False
    instructions = "none"
    has_fast_bf16_linear = False

    def barrier_us(self) -> float:
        """Return 0: there are no barriers between these operators."""
        return 0.0

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
    ) -> "PlainLayer":
        """Return the attention operators of a layer, bound to its KV pages; see `Kernels.layer`."""
        del dtype
        return PlainLayer(pages, num_heads, scaling, window, softcap, sinks)

    def add_rms_norm(
        self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """Compute residual [T, N] += added (unless None); out = its root mean square norm times
        `weight` [N].
        """
        if added is not None:
            residual += added
        out.copy_(_norm(residual, weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """Compute out [T, F] = silu(first half) * second half of gate_up [T, 2 F]."""
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(functional.silu(gate) * up)

    def bf16_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias, in bfloat16 with float32
        sums.
        """
        product = x.float() @ matrix.unpacked().float().T
        out.copy_(product + matrix.bias[: matrix.num_outputs] if len(matrix.bias) else product)

    def int8_linear(self, x: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """Compute out [T, O] = x [T, I] times the matrix plus its bias; each row of x is quantised
        to 8 bits.
        """
        integers, scales = _quantise(x)
        # In float64, where these integer sums are exact, as they are in the compiled kernel.
        sums = integers.double() @ matrix.unpacked().double().T
        product = sums.float() * (scales * matrix.scales[: matrix.num_outputs])
        if len(matrix.bias):
            product += matrix.bias[: matrix.num_outputs]
        out.copy_(product)

    def argmax_rows(
        self, logits: Tensor, out: NDArray[np.int32], is_finite: NDArray[np.bool_]
    ) -> None:
        """Write the index of each row's maximum to `out` and True to `is_finite`; 0 and False for a
        row without a finite maximum.
        """
        best, index = logits.float().max(-1)
        good = torch.isfinite(best)
        is_finite[:] = good.numpy()
        out[:] = torch.where(good, index, 0).numpy()


class PlainLayer:
    """The attention of one layer in PyTorch: a `LayerAttention`."""

    def __init__(
        self,
        pages: Tensor,
        num_heads: int,
        scaling: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        self._pages = pages
        self._num_heads, self._scaling = num_heads, scaling
        self._window, self._softcap, self._sinks = window, softcap, sinks

    def write(self, rows: StepRows, key: Tensor, value: Tensor) -> None:
        """Write new keys and values [T, H, D] to the pages."""
        block_size = self._pages.shape[3]
        for row in np.flatnonzero(rows.counts).tolist():
            packed, positions = _span(rows, row)
            table = torch.from_numpy(rows.block_table[rows.slots[row]])
            blocks, offsets = table[positions // block_size].long(), positions % block_size
            self._pages[blocks, 0, :, offsets] = self._as_rows(key[packed])
            self._pages[blocks, 1, :, offsets] = self._as_rows(value[packed])

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
        num_kv_heads = self._pages.shape[2]
        head_dim = qkv.shape[1] // (self._num_heads + 2 * num_kv_heads)
        heads = qkv.view(len(qkv), -1, head_dim)
        query, key, value = heads.split([self._num_heads, num_kv_heads, num_kv_heads], 1)
        positions = torch.empty(len(qkv), dtype=torch.int64)
        for row in range(rows.num_rows):
            packed, positions_of_row = _span(rows, row)
            positions[packed] = positions_of_row
        angles = cosines[positions, None], sines[positions, None]
        query.copy_(_rotate(query if query_norm is None else _norm(query, query_norm, eps), angles))
        rotated = _rotate(key if key_norm is None else _norm(key, key_norm, eps), angles)
        self.write(rows, rotated, value)

    def attend(self, rows: StepRows, query: Tensor, out: Tensor) -> None:
        """Attend with query [T, Hq, D] to the keys and values in the pages, into out [T, Hq, D]."""
        block_size, group = self._pages.shape[3], self._num_heads // self._pages.shape[2]
        for row in np.flatnonzero(rows.counts).tolist():
            packed, positions = _span(rows, row)
            seen = torch.arange(int(positions[-1]) + 1)
            if self._window:
                seen = seen[max(int(positions[0]) + 1 - self._window, 0) :]
            table = torch.from_numpy(rows.block_table[rows.slots[row]])
            blocks, offsets = table[seen // block_size].long(), seen % block_size
            keys, values = (
                self._as_numbers(self._pages[blocks, kv, :, offsets]).repeat_interleave(group, 1)
                for kv in (0, 1)
            )
            scores = torch.einsum("nhd,khd->hnk", query[packed].float(), keys) * self._scaling
            if self._softcap:
                scores = torch.tanh(scores / self._softcap) * self._softcap
            is_hidden = seen > positions[:, None]
            if self._window:
                is_hidden |= seen <= positions[:, None] - self._window
            scores = scores.masked_fill(is_hidden, float("-inf"))
            if self._sinks is not None:
                sinks = self._sinks.float().view(-1, 1, 1).expand(-1, len(positions), 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., : len(seen)]
            out[packed] = torch.einsum("hnk,khd->nhd", weights, values).to(out.dtype)

    def _as_rows(self, x: Tensor) -> Tensor:
        """Convert keys or values to the format of the pages."""
        if self._pages.dtype is not torch.int8:
            return x
        integers, scales = _quantise(x)
        return torch.cat([integers.char(), scales.contiguous().view(torch.int8)], -1)

    def _as_numbers(self, rows: Tensor) -> Tensor:
        """Convert keys or values from the format of the pages to float32."""
        if self._pages.dtype is not torch.int8:
            return rows.float()
        scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return rows[..., :-SCALE_BYTES] * scales


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's quantised integers and scale [..., 1]; a row of zeros has scale 0, a row
    with a non-finite value has scale NaN.
    """
    greatest = x.float().abs().amax(-1, keepdim=True)
    integers = torch.round(x.float() * (127 / greatest))
    scales = torch.where(torch.isfinite(greatest), greatest / 127, torch.nan)
    return torch.where(scales > 0, integers, 0), scales


def _span(rows: StepRows, row: int) -> tuple[slice, Tensor]:
    """Return the packed indices and the positions of a row's tokens."""
    first, count, start = (
        int(array[row]) for array in (rows.first_tokens, rows.counts, rows.starts)
    )
    return slice(first, first + count), torch.arange(start, start + count)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings (half-split layout) to the first elements of every head, computed in
    float32.
    """
    cosines, sines = angles
    wide, middle = x.float(), cosines.shape[-1]
    first, second = wide[..., :middle], wide[..., middle : 2 * middle]
    parts = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*parts, wide[..., 2 * middle :]], -1).to(x.dtype)
