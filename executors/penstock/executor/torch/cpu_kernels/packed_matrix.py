"""A weight matrix in the layout of packed_linear.c: in bfloat16, or in 8 bits with one scale for
each output.

Contains the layout, the quantisation and the ctypes mirror of the C structure.
"""

import ctypes

import torch
from torch import Tensor

_PANEL = 64
"""Number of columns (outputs) that are stored together."""
_GROUP_BYTES = 4
"""Bytes of one column's consecutive inputs that are stored together."""
_MAX_INT8 = 127
_ZERO = 128
"""Zero point of the 8-bit inputs, which are unsigned."""
MAX_INPUTS = 1 << 16
"""With more inputs, a sum of 8-bit products could overflow 32 bits."""


def can_pack(num_inputs: int, dtype: torch.dtype) -> bool:
    """Return whether a matrix with `num_inputs` inputs can be packed in `dtype`."""
    group = _GROUP_BYTES // dtype.itemsize
    return num_inputs <= MAX_INPUTS and (dtype is torch.int8 or num_inputs % group == 0)


class _CMatrix(ctypes.Structure):
    """Mirrors the C structure `PackedMatrix` of packed_linear.c."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
    )


class PackedMatrix:
    """A packed copy of `weight` [out, in] and `bias` ([out] or None). `dtype`: bfloat16, for an
    even number of inputs, or int8 (the weight is then quantised). Raises ValueError for a number of
    inputs that `can_pack` rejects.

    `packed` [panels, groups, columns of a panel, inputs of a group], padded with zeros; `scales`
    float32 [columns] for int8, else empty. A column is an output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = dtype
        group = _GROUP_BYTES // dtype.itemsize
        is_int8 = dtype is torch.int8
        if not can_pack(self.num_inputs, dtype):
            raise ValueError(f"{self.num_inputs} inputs of a matrix packed in {dtype}")
        num_panels, num_groups = -(-self.num_outputs // _PANEL), -(-self.num_inputs // group)
        num_columns = num_panels * _PANEL
        self.packed = torch.zeros((num_panels, num_groups, _PANEL, group), dtype=dtype)
        self.scales = torch.zeros(num_columns if is_int8 else 0)
        self._offsets = torch.zeros(num_columns if is_int8 else 0, dtype=torch.int32)
        # Panel by panel, because a float32 copy of a large matrix would take four times its memory.
        for panel in range(num_panels):
            rows = weight[panel * _PANEL : (panel + 1) * _PANEL].detach()
            self._pack(panel, self._quantised(panel, rows) if is_int8 else rows)
        self.bias = torch.zeros(0 if bias is None else num_columns)
        if bias is not None:
            self.bias[: self.num_outputs] = bias.detach()
        self._struct = _CMatrix(
            packed=self.packed.data_ptr(),
            offsets=self._offsets.data_ptr() if is_int8 else None,
            scales=self.scales.data_ptr() if is_int8 else None,
            bias=None if bias is None else self.bias.data_ptr(),
            depth=num_groups * _GROUP_BYTES,
            columns=num_columns,
            num_outputs=self.num_outputs,
        )

    @property
    def address(self) -> int:
        """Address of the C structure."""
        return ctypes.addressof(self._struct)

    @property
    def num_bytes(self) -> int:
        """Size of the packed matrix, in bytes."""
        kept = self.packed, self.scales, self._offsets, self.bias
        return sum(tensor.nbytes for tensor in kept)

    def unpacked(self) -> Tensor:
        """Return the matrix [out, in] in `dtype`: for int8, the integers without their scales."""
        panels, groups, _, group = self.packed.shape
        rows = self.packed.transpose(1, 2).reshape(panels * _PANEL, groups * group)
        return rows[: self.num_outputs, : self.num_inputs]

    def _pack(self, panel: int, rows: Tensor) -> None:
        _, groups, _, group = self.packed.shape
        padded = self.packed.new_zeros(_PANEL, groups * group)
        padded[: len(rows), : self.num_inputs] = rows
        self.packed[panel] = padded.view(_PANEL, groups, group).transpose(0, 1)

    def _quantised(self, panel: int, rows: Tensor) -> Tensor:
        scales = rows.abs().amax(1).float() / _MAX_INT8
        integers = torch.round(rows.float() / scales.clamp_min(1e-30)[:, None]).char()
        columns = slice(panel * _PANEL, panel * _PANEL + len(rows))
        self.scales[columns] = scales
        self._offsets[columns] = integers.sum(1, dtype=torch.int32) * -_ZERO
        return integers
