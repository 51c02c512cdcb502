"""A matrix of weights in 8 bits: whole numbers, and a scale for each output.

Owns the quantisation, the layout that int8_linear.c reads, and the mirror of its structure.
"""

import ctypes

import torch
from torch import Tensor

_PANEL, _GROUP = 64, 4
"""Columns that lie together, and the inputs of a column that do."""
_MOST = 127
_ZERO = 128
"""What stands for 0 in a row of 8-bit inputs, which have no sign."""
MAX_INPUTS = 1 << 16
"""Beyond it a sum could leave 32 bits."""


class _CMatrix(ctypes.Structure):
    """`Int8Matrix` of int8_linear.c."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
    )


class Int8Matrix:
    """`weight` [out, in] and `bias` [out] or None, of any float dtype; neither is kept.

    `packed` int8 [panels, groups, columns of a panel, inputs of a group], `scales` and `bias`
    float32 [columns]: filled up with zeros.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        if self.num_inputs > MAX_INPUTS:
            raise ValueError(f"{self.num_inputs} inputs of a matrix in 8 bits, over {MAX_INPUTS}")
        columns = -(-self.num_outputs // _PANEL) * _PANEL
        depth = -(-self.num_inputs // _GROUP) * _GROUP
        self.packed = torch.zeros(columns // _PANEL, depth // _GROUP, _PANEL, _GROUP).char()
        self.scales = torch.zeros(columns)
        self.offsets = torch.zeros(columns, dtype=torch.int32)
        # Panel by panel: the float copies of a large matrix would take four times its memory.
        for panel in range(columns // _PANEL):
            rows = slice(panel * _PANEL, (panel + 1) * _PANEL)
            self._pack(panel, rows, weight[rows].detach().float())
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(columns)
            self.bias[: self.num_outputs] = bias.detach()
        self._struct = _CMatrix(
            packed=self.packed.data_ptr(),
            offsets=self.offsets.data_ptr(),
            scales=self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            depth=depth,
            columns=columns,
            num_outputs=self.num_outputs,
        )

    @property
    def address(self) -> int:
        """Of the C structure."""
        return ctypes.addressof(self._struct)

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        kept = self.packed, self.scales, self.offsets, self.bias
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def quantised(self) -> Tensor:
        """int8 [out, in]."""
        panels, groups = self.packed.shape[:2]
        whole = self.packed.transpose(1, 2).reshape(panels * _PANEL, groups * _GROUP)
        return whole[: self.num_outputs, : self.num_inputs]

    def _pack(self, panel: int, rows: slice, weight: Tensor) -> None:
        scales = weight.abs().amax(1) / _MOST
        whole = torch.round(weight / scales.clamp_min(1e-30)[:, None]).char()
        room = torch.zeros(_PANEL, self.packed.shape[1] * _GROUP, dtype=torch.int8)
        room[: len(whole), : self.num_inputs] = whole
        self.packed[panel] = room.view(_PANEL, -1, _GROUP).transpose(0, 1)
        self.scales[rows][: len(whole)] = scales
        self.offsets[rows] = room.sum(1, dtype=torch.int32) * -_ZERO
