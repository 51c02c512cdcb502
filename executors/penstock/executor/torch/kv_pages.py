"""The paged memory of keys and values: one tensor per layer.

Owns layout, sizing and the mapping from (block, head, offset) to rows. Does not know requests.

Layout: `[num_blocks, 2, num_heads, block_size, head_dim]`; in dimension 1 keys are first, then
values. A block's tokens are contiguous per head, so that a gather of (block, head) rows of
`block_size * head_dim` elements gives `[head, token, dim]` matrices without a transpose: twice as
fast in a matrix product on a CPU as a layout with a token's heads side by side. There is no null
block: 0 is an ordinary block.

In 8 bits, a key or value is `head_dim` integers followed by the four bytes of their float32 scale:
rows of `head_dim + 4` elements of int8.
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
        """Return the number of `dtype` elements of one key or value."""
        return self.head_dim + (SCALE_BYTES if dtype is torch.int8 else 0)


class KVPages:
    """The zero-initialised pages of every layer."""

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
        """Return one layer's pages in the layout above."""
        return self._layers[layer]

    def token_rows(self, layer: int) -> Tensor:
        """Return [rows, head_dim], row ((block * 2 + kv) * num_heads + head) * block_size +
        offset.
        """
        return self._layers[layer].view(-1, self.shapes[layer].head_dim)

    def block_rows(self, layer: int) -> Tensor:
        """Return [rows, block_size * head_dim], row (block * 2 + kv) * num_heads + head."""
        return self._layers[layer].view(-1, self.block_size * self.shapes[layer].head_dim)

    def zero_tokens(self, blocks: Tensor, offsets: Tensor) -> None:
        """Clear places that no sequence has written, or that a failed sequence wrote.

        Attention masks values after the end of a sequence by adding minus infinity and multiplies
        them by zero; neither removes a value that is not finite.
        """
        for pages in self._layers:
            pages[blocks, :, :, offsets] = 0


def page_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return the number format of pages for a setting and a model in `dtype`."""
    return {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_cache_dtype]


def block_bytes(shapes: tuple[HeadShape, ...], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    row_sizes = (2 * shape.num_heads * shape.row_size(dtype) for shape in shapes)
    return sum(row_sizes) * block_size * dtype.itemsize
