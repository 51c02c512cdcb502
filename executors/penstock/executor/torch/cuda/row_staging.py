"""Copies a step's rows to the device in one transfer from pinned memory.

Packs a `Batch` into the kernels' format. The slot arrays are read only during `launch`. Rows of a
decode step need only slot, position, token and block from the host (see `embed_rows`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.page_attention import Chunks
from penstock.scheduler.batch import Batch

Ints = NDArray[np.int64]
_ALIGNMENT = 32
"""Alignment of each array, in elements, which allows the widest loads."""
_MAX_CELLS = 1 << 20
"""Maximum number of block table entries for which memory is allocated at start: 12 MiB per step."""
_MIN_PACKED = 1024
DRAWN = -1
"""Placeholder token id: use the token that the device sampled for that position."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """A packed step on the device.

    `staged` int32 [4, tokens or more]: see `embed_rows`. `wanted` int32: indices of the packed
    tokens whose logits are sampled. `slots`, `positions` int64: slot and position of each token to
    sample; `sampled` has both on the host. `table_places` int64, `table_blocks` int32: flat indices
    and values of the block table entries before the chunks. `last_of_row`: packed index of
    each row's last token.
    """

    staged: Tensor
    chunks: Chunks
    num_decodes: int
    wanted: Tensor
    slots: Tensor
    positions: Tensor
    sampled: tuple[Ints, Ints]
    table_places: Tensor
    table_blocks: Tensor
    last_of_row: Ints

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step."""
        return self.num_decodes + self.chunks.num_tokens


class RowStaging:
    """One set of pinned memory, used by one step until its result is collected.

    `scratch`: slot and block of padding rows. `num_packed`: number of int32 elements to allocate
    for packed steps, see `packed_size`. A larger step allocates pinned memory; the allocation may
    wait for queued work.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        *,
        max_rows: int,
        scratch: tuple[int, int],
        num_packed: int = _MIN_PACKED,
    ) -> None:
        self._queue = queue
        self._scratch_slot, self._scratch_block = scratch
        self._rows = queue.pinned((4, _aligned(max_rows)), torch.int32)
        self._rows_on_host = self._rows.numpy()
        self._packed = queue.pinned((num_packed,), torch.int32)

    def empty_rows(self) -> Tensor:
        """Allocate the device memory in which decode steps are staged."""
        return torch.empty_like(self._rows, device=self._queue.device, pin_memory=False)

    def stage_scratch(self, staged: Tensor) -> None:
        """Queue the copy of padding rows to all of `staged`."""
        self._pad(0, self._rows.shape[1])
        staged.copy_(self._rows, non_blocking=True)

    def stage_decodes(self, batch: Batch, staged: Tensor, num_padded: int) -> None:
        """Queue the copy of a batch of decodes to `staged`, followed by padding rows up to
        `num_padded` rows in total.
        """
        num_rows = batch.num_rows
        rows = self._rows_on_host
        _fill_decodes(batch, rows[:, :num_rows], num_rows)
        self._pad(num_rows, num_padded)
        staged.copy_(self._rows, non_blocking=True)

    def stage_packed(
        self, batch: Batch, *, tokens_per_tile: int, table_width: int, is_probe: bool = False
    ) -> PackedRows:
        """Queue the copy of a batch with any mix of rows; return its arrays on the device.

        A probe runs in the scratch slot. `table_width`: entries per slot in the device's block
        table; the scheduler's table may be narrower.
        """
        num_decodes = batch.num_decodes
        slots = batch.slots.astype(np.int64)
        counts = batch.num_tokens.astype(np.int64)
        starts = batch.starts.astype(np.int64)
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        per_token = _token_rows(batch, slots, counts, starts, ends)
        if is_probe:
            slots = np.full_like(slots, self._scratch_slot)
            per_token[0] = self._scratch_slot
        tiles = _tiles(counts[num_decodes:], starts[num_decodes:], tokens_per_tile)
        is_sampled = np.isin(batch.slots, batch.sampled_slots)
        sampled = slots[is_sampled], (starts + counts)[is_sampled]
        places, blocks = _table_entries_before_chunks(batch, slots, table_width)
        parts = (
            *tiles,
            np.concatenate((ends[num_decodes:] - counts[num_decodes:], ends[-1:])),
            starts[num_decodes:],
            slots[num_decodes:],
            ends[is_sampled] - 1,
            blocks,
            *(part.view(np.int32) for part in (*sampled, places)),
        )
        staged, *rest = self._copy(per_token, parts)
        wide = [part.view(torch.int64) for part in rest[7:]]
        return PackedRows(
            staged=staged,
            chunks=Chunks(
                first_token=num_decodes,
                num_tokens=num_tokens - num_decodes,
                num_tiles=len(tiles[0]),
                tile_chunks=rest[0],
                tile_tokens=rest[1],
                firsts=rest[2],
                starts=rest[3],
                slots=rest[4],
            ),
            num_decodes=num_decodes,
            wanted=rest[5],
            slots=wide[0],
            positions=wide[1],
            sampled=sampled,
            table_places=wide[2],
            table_blocks=rest[6],
            last_of_row=ends - 1,
        )

    def _pad(self, first: int, last: int) -> None:
        padding = self._rows_on_host[:, first:last]
        padding[0] = self._scratch_slot
        padding[1:3] = 0
        padding[3] = self._scratch_block

    def _copy(
        self, matrix: NDArray[np.int32], rows: tuple[NDArray[np.int64] | NDArray[np.int32], ...]
    ) -> list[Tensor]:
        """Queue the copy of `matrix` [4, tokens] and of the arrays `rows` to the device, as int32
        in one transfer; return them on the device in this order. `matrix` gets columns of undefined
        content up to a multiple of `_ALIGNMENT`.
        """
        width = _aligned(matrix.shape[1])
        sizes = [_aligned(len(row)) for row in rows]
        total = 4 * width + sum(sizes)
        if self._packed.numel() < total:
            self._packed = self._queue.pinned((total * 5 // 4,), torch.int32)
        on_host: NDArray[np.int32] = self._packed.numpy()
        on_host[: 4 * width].reshape(4, width)[:, : matrix.shape[1]] = matrix
        first = 4 * width
        for row, size in zip(rows, sizes, strict=True):
            on_host[first : first + len(row)] = row
            first += size
        on_device = self._packed[:total].to(self._queue.device, non_blocking=True)
        found = [on_device[: 4 * width].view(4, width)]
        first = 4 * width
        for row, size in zip(rows, sizes, strict=True):
            found.append(on_device[first : first + len(row)])
            first += size
        return found


def packed_size(*, num_tokens: int, num_rows: int, tokens_per_tile: int, table_width: int) -> int:
    """Return the number of int32 elements to allocate for `stage_packed`, for steps of at most this
    size.

    `table_width`: blocks of the longest sequence. At most `_MAX_CELLS` block table entries are
    counted; the buffer grows for a step with more.
    """
    num_cells = min(num_rows * table_width, _MAX_CELLS)
    num_tiles = num_tokens // tokens_per_tile + num_rows
    rows, cells = _aligned(num_rows), _aligned(num_cells)
    of_chunks = 2 * _aligned(num_tiles) + _aligned(num_rows + 1) + 2 * rows
    sampled = rows + 2 * _aligned(2 * num_rows)
    return 4 * _aligned(num_tokens) + of_chunks + sampled + cells + _aligned(2 * num_cells)


def _aligned(count: int) -> int:
    return max(1, -(-count // _ALIGNMENT)) * _ALIGNMENT


def _fill_decodes(batch: Batch, rows: NDArray[np.int32], count: int) -> None:
    """Fill `rows` int32 [4, count] (slot, position, token id, block) from the first `count` rows of
    the batch. These rows must be decodes.

    The token id is DRAWN if only the device has the token.
    """
    arrays = batch.arrays
    slots, starts = batch.slots[:count], batch.starts[:count]
    rows[0] = slots
    rows[1] = starts
    rows[2] = np.where(starts < arrays.num_tokens[slots], arrays.token_ids[slots, starts], DRAWN)
    rows[3] = arrays.block_table[slots, starts // arrays.block_size]


def _token_rows(
    batch: Batch, slots: Ints, counts: Ints, starts: Ints, ends: Ints
) -> NDArray[np.int32]:
    """Return the `staged` rows, int32 [4, tokens], of a whole batch: decodes, then every token of
    every chunk.
    """
    arrays, num_decodes = batch.arrays, batch.num_decodes
    per_token = np.empty((4, int(ends[-1])), dtype=np.int32)
    if num_decodes:
        _fill_decodes(batch, per_token[:, :num_decodes], num_decodes)
    of_chunks = slice(num_decodes, None)
    token_slots = np.repeat(slots[of_chunks], counts[of_chunks])
    firsts = ends[of_chunks] - counts[of_chunks] - starts[of_chunks]
    positions = np.arange(num_decodes, int(ends[-1])) - np.repeat(firsts, counts[of_chunks])
    per_token[0, num_decodes:] = token_slots
    per_token[1, num_decodes:] = positions
    # An invalid (negative) token id must not be interpreted as DRAWN.
    per_token[2, num_decodes:] = np.maximum(arrays.token_ids[token_slots, positions], 0)
    per_token[3, num_decodes:] = arrays.block_table[token_slots, positions // arrays.block_size]
    return per_token


def _tiles(counts: Ints, starts: Ints, tokens_per_tile: int) -> tuple[Ints, Ints]:
    """Return, for every tile, its chunk and its first token in the chunk.

    Tiles that read the most keys come first.
    """
    num_tiles = -(-counts // tokens_per_tile)
    chunks = np.repeat(np.arange(len(counts)), num_tiles)
    within = np.arange(len(chunks)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    tokens = within * tokens_per_tile
    order = np.argsort(-(starts[chunks] + tokens), kind="stable")
    return chunks[order], tokens[order]


def _table_entries_before_chunks(
    batch: Batch, slots: Ints, width: int
) -> tuple[Ints, NDArray[np.int32]]:
    """Return the block table entries before each chunk: their flat indices in the device's table,
    and their blocks. They must be copied to the device's table, because it lacks the entries of
    prefix cache hits.

    `slots`: the slots in which the step runs.
    """
    arrays = batch.arrays
    places: list[Ints] = [np.zeros(0, dtype=np.int64)]
    blocks: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)]
    for row in range(batch.num_decodes, batch.num_rows):
        num_before = int(batch.starts[row]) // arrays.block_size
        if num_before:
            places.append(int(slots[row]) * width + np.arange(num_before))
            blocks.append(arrays.block_table[int(batch.slots[row]), :num_before])
    return np.concatenate(places), np.concatenate(blocks)
