"""Launches the attention kernels of a step.

Chooses grids and tiles, and holds the scratch memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.fixed_kernel import FixedKernel
from penstock.executor.torch.cuda.kernels.chunk_attention import chunk_attention, rotate_and_write
from penstock.executor.torch.cuda.kernels.decode_attention import decode_attention
from penstock.executor.torch.cuda.scratch import Scratch
from penstock.executor.torch.cuda.tiles import MAX_LONG_ROWS, DecodeTile, chunk_tile, decode_tile
from penstock.executor.torch.fused_weights import LayerWeights
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.rotary_table import RotaryTable

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The attention heads of a layer. `scaling`: factor of the scores; `eps`: the epsilon of query
    and key norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    eps: float

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_query_elements(self) -> int:
        """Number of elements of one token's queries, and of its attention output."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """The chunks of a packed step (each a run of tokens of one request), as int32 arrays on the
    device; see `chunk_attention`.

    They cover the packed tokens `first_token .. first_token + num_tokens - 1`.
    """

    first_token: int
    num_tokens: int
    num_tiles: int
    tile_chunks: Tensor
    tile_tokens: Tensor
    firsts: Tensor
    starts: Tensor
    slots: Tensor


class PageAttention:
    """Rotates queries and keys, writes keys and values to pages, and computes attention. `table`
    int32 [slots, blocks]: the device's block table.

    `max_rows`: maximum number of single-token rows. `dtype`: the format of queries, keys and values
    in a step; the pages may be in 8 bits. `scales`: the scales of each layer's pages (see
    `measure_scales`), None without scales.
    """

    def __init__(
        self,
        layout: HeadLayout,
        pages: KVPages,
        table: Tensor,
        rotary: RotaryTable,
        *,
        dtype: torch.dtype,
        max_rows: int,
        scales: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.layout = layout
        self._pages = pages
        self._table = table
        self._rotary = rotary
        self._scales = scales
        # The dtype to which the kernels convert the content of 8-bit pages for products.
        self._query_dtype = torch.float16 if pages.dtype.itemsize == 1 else dtype
        self._chunk_tile = chunk_tile(
            group=layout.group, head_dim=layout.head_dim, dtype=self._query_dtype
        )
        self._precision = "ieee" if self._query_dtype == torch.float32 else "tf32"
        self._dim_width = max(16, 1 << (layout.head_dim - 1).bit_length())
        num_pairs = max_rows * layout.num_kv_heads
        # Short contexts have at most 1,024 parts; see `decode_tile`.
        num_parts = max(1024, min(max_rows, MAX_LONG_ROWS) * layout.num_kv_heads * 32)
        num_parts *= layout.group
        device = pages.device
        self._part_sums = torch.empty(num_parts * layout.head_dim, device=device)
        self._part_scales = torch.empty(num_parts * 2, device=device)
        self._counters = torch.zeros(num_pairs, dtype=torch.int32, device=device)
        self._decodes: dict[tuple[DecodeTile, bool, bool], FixedKernel] = {}
        self._chunks: dict[tuple[bool, bool], tuple[FixedKernel, FixedKernel]] = {}

    @property
    def tokens_per_tile(self) -> int:
        """Number of tokens of a chunk that one program processes."""
        return self._chunk_tile.rows // self.layout.group

    def tile_for(self, rows: int, *, is_long: bool) -> DecodeTile:
        """Return the tile of `rows` decode rows; `is_long`: a context exceeds LONG_CONTEXT."""
        layout = self.layout
        return decode_tile(
            rows=rows,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=self._query_dtype,
            is_long=is_long,
            is_fp8=self._pages.dtype.itemsize == 1,
        )

    def decode(
        self,
        index: int,
        layer: LayerWeights,
        qkv: Tensor,
        out: Tensor,
        staged: Tensor,
        *,
        rows: int,
        tile: DecodeTile,
    ) -> None:
        """Write keys and values of the first `rows` rows of `qkv`, one token each, to the pages;
        compute their attention into `out`. `index`: index of the layer. `qkv` and `out` have the
        shapes given at `decode_attention`; `staged` as in `embed_rows`.
        """
        layout, table = self.layout, self._table
        key = (tile, layer.window > 0, layer.query_norm is not None)
        kernel = self._decodes.get(key)
        if kernel is None:
            kernel = self._decodes[key] = self._decode_kernel(*key)
        kernel.launch(
            (layout.num_kv_heads, rows, tile.splits),
            (
                qkv,
                qkv if layer.query_norm is None else layer.query_norm,
                qkv if layer.key_norm is None else layer.key_norm,
                self._pages.layer(index),
                qkv if self._scales is None else self._scales[index],
                table,
                staged,
                self._rotary.cosines,
                self._rotary.sines,
                out,
                self._part_sums,
                self._part_scales,
                self._counters,
            ),
            table.stride(0),
            staged.stride(0),
            layout.scaling * _LOG2_E,
            layout.eps,
            layer.window,
        )

    def chunks(
        self,
        index: int,
        layer: LayerWeights,
        qkv: Tensor,
        out: Tensor,
        staged: Tensor,
        chunks: Chunks,
        scratch: Scratch,
    ) -> None:
        """Write keys and values of the packed tokens of `chunks` to the pages; compute their
        attention into `out`. Parameters as in `decode`; `scratch` provides the buffer of the
        rotated queries.
        """
        layout, table = self.layout, self._table
        shape = (qkv.shape[0], layout.num_query_elements)
        queries = scratch.empty("queries", shape, self._query_dtype)
        pages = self._pages.layer(index)
        scales = qkv if self._scales is None else self._scales[index]
        key = (layer.window > 0, layer.query_norm is not None)
        kernels = self._chunks.get(key)
        if kernels is None:
            kernels = self._chunks[key] = self._chunk_kernels(*key)
        rotate, attend = kernels
        rotate.launch(
            (chunks.num_tokens, layout.num_kv_heads, 1),
            (
                qkv,
                qkv if layer.query_norm is None else layer.query_norm,
                qkv if layer.key_norm is None else layer.key_norm,
                queries,
                pages,
                scales,
                staged,
                self._rotary.cosines,
                self._rotary.sines,
            ),
            staged.stride(0),
            chunks.first_token,
            layout.eps,
        )
        attend.launch(
            (chunks.num_tiles, layout.num_kv_heads, 1),
            (
                queries,
                pages,
                scales,
                table,
                chunks.tile_chunks,
                chunks.tile_tokens,
                chunks.firsts,
                chunks.starts,
                chunks.slots,
                out,
            ),
            table.stride(0),
            layout.scaling * _LOG2_E,
            layer.window,
        )

    def _decode_kernel(self, tile: DecodeTile, has_window: bool, has_norm: bool) -> FixedKernel:
        return FixedKernel(
            decode_attention,
            has_norm=has_norm,
            has_window=has_window,
            group_width=max(16, 1 << (self.layout.group - 1).bit_length()),
            tile=tile.keys,
            splits=tile.splits,
            precision=self._precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._shape(),
        )

    def _chunk_kernels(self, has_window: bool, has_norm: bool) -> tuple[FixedKernel, FixedKernel]:
        tile, shape = self._chunk_tile, self._shape()
        rotate = FixedKernel(
            rotate_and_write,
            has_norm=has_norm,
            group_width=1 << (self.layout.group - 1).bit_length(),
            num_warps=1,
            **shape,
        )
        attend = FixedKernel(
            chunk_attention,
            has_window=has_window,
            rows=tile.rows,
            tile=tile.keys,
            precision=self._precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **shape,
        )
        return rotate, attend

    def _shape(self) -> dict[str, int]:
        return {
            "has_scales": self._scales is not None,
            "kv_heads": self.layout.num_kv_heads,
            "group": self.layout.group,
            "dim": self.layout.head_dim,
            "dim_width": self._dim_width,
            "block_size": self._pages.block_size,
        }
