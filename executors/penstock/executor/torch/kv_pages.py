"""The paged KV cache: one tensor per layer.

Layout: `[num_blocks, 2, num_heads, block_size, head_dim]`; dimension 1: keys, values. A block's
tokens are contiguous per head, so that a gather of (block, head) rows of `block_size * head_dim`
elements gives `[head, token, dim]` matrices without a transpose. On a CPU a matrix product is
faster than with a layout in which a token's heads are contiguous. Block 0 is an ordinary block (no
null block).

In int8, a key or value is `head_dim` integers followed by the four bytes of their float32 scale:
rows of `head_dim + 4` elements. In fp8, rows have no scales.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Shape of one token's keys and values in a layer: `num_heads` of `head_dim` elements each."""

    num_heads: int
    head_dim: int

    def row_size(self, dtype: torch.dtype) -> int:
        """Return the number of elements of one key or value stored in `dtype`."""
        return self.head_dim + (SCALE_BYTES if dtype is torch.int8 else 0)


class KVPages:
    """The KV cache of all layers on one device: `num_blocks` blocks of `block_size` tokens each,
    initialised to zero. `shapes` has the shape of each layer's keys and values.
    """

    def __init__(
        self,
        shapes: tuple[HeadShape, ...],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._layers = [
            torch.zeros(
                (num_blocks, 2, shape.num_heads, block_size, shape.row_size(dtype)),
                dtype=dtype,
                device=device,
            )
            for shape in shapes
        ]

    def layer(self, layer: int) -> Tensor:
        """Return the pages of the layer with index `layer`; for their layout see the module
        docstring.
        """
        return self._layers[layer]

    def token_rows(self, layer: int) -> Tensor:
        """Return one layer as [rows, head_dim]; row = ((block * 2 + kv) * num_heads + head) *
        block_size + offset; kv is 0 for keys, 1 for values. Not for int8 pages.
        """
        return self._layers[layer].view(-1, self.shapes[layer].head_dim)

    def block_rows(self, layer: int) -> Tensor:
        """Return one layer as [rows, block_size * head_dim]; row = (block * 2 + kv) * num_heads +
        head. Not for int8 pages.
        """
        return self._layers[layer].view(-1, self.block_size * self.shapes[layer].head_dim)

    def zero_tokens(self, blocks: Tensor, offsets: Tensor) -> None:
        """Zero the keys and values at `offsets` [n] of `blocks` [n], in all layers.

        Needed for places that no sequence has written, or that a failed sequence wrote: attention
        masks scores by adding minus infinity and multiplies values by zero, and neither removes
        non-finite values.
        """
        for pages in self._layers:
            pages[blocks, :, :, offsets] = 0


def page_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the pages for the setting `kv_cache_dtype` and a model in `dtype`."""
    return {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_cache_dtype]


def block_bytes(shapes: tuple[HeadShape, ...], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block in bytes, over all layers."""
    row_sizes = (2 * shape.num_heads * shape.row_size(dtype) for shape in shapes)
    return sum(row_sizes) * block_size * dtype.itemsize
