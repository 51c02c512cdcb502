"""The rows of one step in the kernels' format: pointers into the batch's arrays, without copies."""

import ctypes

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class CRows(ctypes.Structure):
    """Mirrors the C structure `Rows` of kernels.h."""

    _fields_ = (
        ("first_tokens", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class StepRows:
    """The rows of a step. Row i has `counts[i]` tokens of one sequence, from position `starts[i]`
    on. The sequence's blocks are `block_table[slots[i]]`; the packed indices of the row's tokens
    begin at `first_tokens[i]`.
    """

    __slots__ = (
        "_address",
        "_struct",
        "block_table",
        "counts",
        "first_tokens",
        "num_rows",
        "num_tokens",
        "slots",
        "starts",
    )

    def __init__(self) -> None:
        self._struct = CRows()
        self._address = ctypes.addressof(self._struct)
        self.num_rows = 0
        self.num_tokens = 0
        self.first_tokens = self.counts = self.starts = self.slots = np.zeros(0, dtype=np.int32)
        self.block_table = np.zeros((0, 0), dtype=np.int32)

    @property
    def address(self) -> int:
        """Address of the C structure."""
        return self._address

    def set(
        self,
        *,
        first_tokens: Int32s,
        num_tokens: Int32s,
        starts: Int32s,
        slots: Int32s,
        block_table: Int32s,
    ) -> None:
        """Set the arrays of a step. The kernels read them in place until the next `set`. Raises
        ValueError for an array that is not contiguous int32.
        """
        self.first_tokens, self.counts = first_tokens, num_tokens
        self.starts, self.slots, self.block_table = starts, slots, block_table
        struct = self._struct
        struct.first_tokens = _address(first_tokens)
        struct.num_tokens = _address(num_tokens)
        struct.starts = _address(starts)
        struct.slots = _address(slots)
        struct.block_table = _address(block_table)
        struct.table_stride = block_table.shape[1]
        struct.num_rows = self.num_rows = len(slots)
        self.num_tokens = int(num_tokens.sum())


def _address(array: Int32s) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError("rows are given as contiguous int32 arrays")
    address: int = array.__array_interface__["data"][0]
    return address
