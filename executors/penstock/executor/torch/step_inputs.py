"""One step as tensors: converts a `Batch` and the slot arrays to packed rows and page indices.

All tokens of a step form one packed sequence [T]: first the single-token rows, ordered by context
length (so that length groups are slices), then the longer chunks. Data that layers share is
computed once per step, on first use, and cached.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from penstock.executor.torch.kv_pages import HeadShape, KVPages
from penstock.scheduler.batch import Batch

_MAX_CUTS = 12
"""Maximum number of positions considered as ends of groups."""

Ints = NDArray[np.int64]

_MIN_WINDOW_TILE = 256
"""Minimum number of tokens in a tile of a layer with a window; with fewer, a product is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Single-token rows `first .. last - 1`; each reads `width` blocks, padding included.

    `page_rows` int64 [2, rows, heads, width]: the rows of `KVPages.block_rows` to gather. `mask`
    [rows, 1, 1, width * block_size]: 0 for keys that a row attends to, else minus infinity.
    """

    first: int
    last: int
    width: int
    page_rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Packed tokens `first .. last - 1`: positions `start .. end - 1` of one request.

    `blocks` int64: its block table, up to the last token of the chunk.
    """

    first: int
    last: int
    start: int
    blocks: Ints

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.last - self.first

    def first_key(self, position: int, window: int) -> int:
        """Return the first position that the token at `position` attends to."""
        return max(position + 1 - window, 0) if window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKeys:
    """The keys that a chunk attends to: gathered blocks, and one mask for all its tiles of tokens.

    `page_rows` int64 [2, heads, blocks]: rows of `KVPages.block_rows`, from the block of position
    `first` on. `mask` [tile, num_past + tile], 0 or minus infinity: a tile's keys end with its last
    token and begin at most `num_past` before its first token.
    """

    first: int
    num_past: int
    page_rows: Tensor
    mask: Tensor

    def tile(self, chunk: Chunk, rows: slice, window: int) -> tuple[slice, Tensor]:
        """Return the slice of gathered keys that the chunk's tokens `rows` attend to, and their
        mask.
        """
        position = chunk.start + rows.start
        first_key = chunk.first_key(position, window)
        columns = slice(
            self.num_past - (position - first_key), self.num_past + rows.stop - rows.start
        )
        seen = slice(first_key - self.first, chunk.start + rows.stop - self.first)
        return seen, self.mask[: rows.stop - rows.start, columns]


class StepInputs:
    """The tensors of a packed step of T tokens. `overhead_blocks`: see `split_by_length`.

    `input_ids`, `position_ids` int64 [1, T]. `blocks`, `offsets` int64 [T]: destination of each
    token's keys and values. `last_of_row` [rows of the batch]: packed index of each batch row's
    last token. `num_singles` single-token rows come first, then `chunks`. `unwritten_blocks`,
    `unwritten_offsets` int64: places past the end of a sequence, in blocks that the sequence first
    writes to in this step.
    """

    def __init__(
        self, batch: Batch, pages: KVPages, *, num_embeddings: int, overhead_blocks: float
    ) -> None:
        self._pages = pages
        self._overhead_blocks = overhead_blocks
        self._token_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._row_groups: dict[tuple[int, int], tuple[RowGroup, ...]] = {}
        self._chunk_keys: dict[tuple[int, int, int, int], ChunkKeys] = {}
        self._rows: StepRows | None = None
        block_size = pages.block_size

        order, num_singles = _packing_order(batch)
        slots = batch.slots[order].astype(np.int64)
        counts = batch.num_tokens[order].astype(np.int64)
        starts = batch.starts[order].astype(np.int64)
        row_ends = np.cumsum(counts)
        token_slots = np.repeat(slots, counts)
        positions = np.arange(row_ends[-1]) - np.repeat(row_ends - counts - starts, counts)
        # Another check fails the request of an invalid token id; here it must not affect other
        # requests.
        ids = np.clip(batch.arrays.token_ids[token_slots, positions], 0, num_embeddings - 1)

        self.num_tokens = int(row_ends[-1])
        self.num_singles = num_singles
        self.last_of_row: Ints = np.empty(len(order), dtype=np.int64)
        self.last_of_row[order] = row_ends - 1
        self._batch, self._order, self._firsts = batch, order, row_ends - counts
        table = batch.arrays.block_table
        self.blocks: Ints = table[token_slots, positions // block_size].astype(np.int64)
        self.offsets: Ints = positions % block_size
        last_blocks = self.blocks[row_ends - 1]
        self.unwritten_blocks, self.unwritten_offsets = _unwritten(
            last_blocks, starts, starts + counts, block_size
        )
        self.input_ids = self.to_device(ids.astype(np.int64)).unsqueeze(0)
        self.position_ids = self.to_device(positions).unsqueeze(0)
        self._single_lengths: Ints = starts[:num_singles] + 1
        width = -(-int(self._single_lengths[-1]) // block_size) if num_singles else 0
        self._single_blocks: Ints = table[slots[:num_singles], :width].astype(np.int64)
        ends = starts + counts
        self.chunks = tuple(
            Chunk(
                first=int(row_ends[row] - counts[row]),
                last=int(row_ends[row]),
                start=int(starts[row]),
                blocks=table[slots[row], : -(-int(ends[row]) // block_size)].astype(np.int64),
            )
            for row in range(num_singles, len(order))
        )

    def to_device(self, values: Ints) -> Tensor:
        """Copy a host array to the model's device."""
        return torch.from_numpy(values).to(self._pages.device)

    @property
    def rows(self) -> StepRows:
        """The rows in the format of the CPU kernels."""
        if self._rows is None:
            batch, order = self._batch, self._order
            self._rows = StepRows()
            self._rows.set(
                first_tokens=self._firsts.astype(np.int32),
                num_tokens=batch.num_tokens[order].astype(np.int32),
                starts=batch.starts[order].astype(np.int32),
                slots=batch.slots[order].astype(np.int32),
                block_table=batch.arrays.block_table,
            )
        return self._rows

    def token_rows(self, shape: HeadShape) -> tuple[Tensor, Tensor]:
        """Return the rows of `KVPages.token_rows` for all keys, and the rows for all values, each
        [T * heads].
        """
        rows = self._token_rows.get(shape.num_heads)
        if rows is None:
            block_size = self._pages.block_size
            heads = np.arange(shape.num_heads)
            keys = (self.blocks[:, None] * 2 * shape.num_heads + heads) * block_size
            keys = (keys + self.offsets[:, None]).reshape(-1)
            values = keys + shape.num_heads * block_size
            rows = (self.to_device(keys), self.to_device(values))
            self._token_rows[shape.num_heads] = rows
        return rows

    def row_groups(self, shape: HeadShape, window: int) -> tuple[RowGroup, ...]:
        """Return the single-token rows in groups; `window`: number of keys that a row may attend
        to, 0: no window.
        """
        key = (shape.num_heads, window)
        groups = self._row_groups.get(key)
        if groups is None:
            groups = self._make_row_groups(shape, window)
            self._row_groups[key] = groups
        return groups

    def _make_row_groups(self, shape: HeadShape, window: int) -> tuple[RowGroup, ...]:
        block_size = self._pages.block_size
        lengths = self._single_lengths
        first_keys = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        first_blocks = first_keys // block_size
        num_blocks = -(-lengths // block_size) - first_blocks
        if window:
            # A window that is aligned to blocks covers one block less, but groups need ascending
            # widths.
            num_blocks = np.maximum.accumulate(num_blocks)
        groups: list[RowGroup] = []
        for first, last, width in split_by_length(num_blocks, self._overhead_blocks):
            columns = first_blocks[first:last, None] + np.arange(width)
            own_blocks = -(-lengths[first:last, None] // block_size)
            # Padding repeats one of the row's own blocks, not blocks of another request.
            columns = np.where(columns < own_blocks, columns, first_blocks[first:last, None])
            blocks = np.take_along_axis(self._single_blocks[first:last], columns, axis=1)
            positions = first_blocks[first:last, None] * block_size + np.arange(width * block_size)
            is_seen = (positions < lengths[first:last, None]) & (
                positions >= first_keys[first:last, None]
            )
            groups.append(
                RowGroup(
                    first=first,
                    last=last,
                    width=width,
                    page_rows=self.to_device(_page_rows(blocks, shape.num_heads)),
                    mask=self._additive(torch.from_numpy(is_seen))[:, None, None, :],
                )
            )
        return tuple(groups)

    def chunk_keys(self, index: int, shape: HeadShape, window: int, max_elements: int) -> ChunkKeys:
        """Return the keys that chunk `index` attends to; `window` 0: no window.

        `max_elements` limits tokens times keys of a tile; a tile has at least one token.
        """
        key = (index, shape.num_heads, window, max_elements)
        keys = self._chunk_keys.get(key)
        if keys is None:
            chunk = self.chunks[index]
            first_block = chunk.first_key(chunk.start, window) // self._pages.block_size
            pages = _page_rows(chunk.blocks[None, first_block:], shape.num_heads)
            tile = self._tile_of(chunk, window, max_elements)
            last_tile = chunk.end - 1 - (chunk.end - 1 - chunk.start) % tile
            num_past = last_tile - chunk.first_key(last_tile, window)
            device = self._pages.device
            columns = torch.arange(-num_past, tile, device=device)
            rows = torch.arange(tile, device=device)[:, None]
            is_seen = columns <= rows
            if window:
                is_seen &= columns > rows - window
            keys = ChunkKeys(
                first=first_block * self._pages.block_size,
                num_past=num_past,
                page_rows=self.to_device(pages).view(2, shape.num_heads, -1),
                mask=self._additive(is_seen),
            )
            self._chunk_keys[key] = keys
        return keys

    def _tile_of(self, chunk: Chunk, window: int, max_elements: int) -> int:
        """Return the number of tokens of a chunk per tile."""
        tile = num_tokens = chunk.end - chunk.start
        if window and self._pages.device.type == "cpu":
            # Each token attends to `window` of the tile's `window + tile` keys.
            tile = min(tile, max(window, _MIN_WINDOW_TILE))
        num_keys = min(chunk.end, window + tile) if window else chunk.end
        return min(tile, max(max_elements // num_keys, 1), num_tokens)

    def _additive(self, is_seen: Tensor) -> Tensor:
        mask = torch.zeros(is_seen.shape, dtype=self._pages.dtype, device=self._pages.device)
        return mask.masked_fill_(~is_seen.to(self._pages.device), float("-inf"))


def _packing_order(batch: Batch) -> tuple[Ints, int]:
    """Return batch rows in packed order, and how many of them are single tokens."""
    is_single = batch.num_tokens == 1
    singles = np.flatnonzero(is_single)
    singles = singles[np.argsort(batch.starts[singles], kind="stable")]
    return np.concatenate([singles, np.flatnonzero(~is_single)]), len(singles)


def _unwritten(last_blocks: Ints, starts: Ints, ends: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Return the places (blocks, offsets) after the end of each sequence in its last block, for
    last blocks to which the sequence first writes in this step.
    """
    first_free = ends % block_size
    is_entered = (starts <= ends - first_free) & (first_free > 0)
    counts = (block_size - first_free)[is_entered]
    group_ends = np.cumsum(counts)
    offsets = np.arange(counts.sum()) - np.repeat(group_ends - block_size, counts)
    return np.repeat(last_blocks[is_entered], counts), offsets


def _page_rows(blocks: Ints, num_heads: int) -> Ints:
    """Return the rows of `KVPages.block_rows` of blocks [rows, width], as [2, rows, heads,
    width].
    """
    pages = np.arange(2)[:, None, None, None] * num_heads + np.arange(num_heads)[:, None]
    return blocks[:, None, :] * 2 * num_heads + pages


def split_by_length(
    num_blocks: NDArray[np.int64], overhead_blocks: float
) -> list[tuple[int, int, int]]:
    """Return groups (first row, row after the last, width) of rows that are sorted by `num_blocks`
    (ascending, [n]).

    Every row of a group is padded to the `width` of its longest row. A group costs
    `overhead_blocks` plus rows times width; the partition with the lowest total cost is found by
    dynamic programming over evenly spaced cuts.
    """
    num_rows = len(num_blocks)
    if num_rows == 0:
        return []
    num_cuts = min(num_rows, _MAX_CUTS)
    cuts = [num_rows * i // num_cuts for i in range(num_cuts + 1)]
    widths = [0] + [int(num_blocks[cut - 1]) for cut in cuts[1:]]
    best = [0.0] * (num_cuts + 1)
    previous = [0] * (num_cuts + 1)
    for end in range(1, num_cuts + 1):
        costs = [
            best[start] + overhead_blocks + (cuts[end] - cuts[start]) * widths[end]
            for start in range(end)
        ]
        previous[end] = min(range(end), key=costs.__getitem__)
        best[end] = costs[previous[end]]
    groups: list[tuple[int, int, int]] = []
    end = num_cuts
    while end > 0:
        start = previous[end]
        groups.append((cuts[start], cuts[end], widths[end]))
        end = start
    return groups[::-1]
