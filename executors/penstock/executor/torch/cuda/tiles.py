"""Tile sizes of the kernels, with the numbers of warps, pipeline stages and splits.

They were tuned by benchmark on an H200, except the tile of a long row in fp8, tuned on an H100
(docs/gpu.md). They depend on the shape of heads, the rows of a step and the precision; there is no
autotuning at run time.
"""

from dataclasses import dataclass

import torch

LONG_CONTEXT = 2048
"""Context length, in keys, above which a step of few rows uses more splits."""
MAX_LONG_ROWS = 8
"""Maximum number of rows for which a separate graph with more splits is captured."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Row counts for which decode graphs are captured; above the last, multiples of 128."""

_NUM_TILES_OF_FULL_DEVICE = 128
"""Number of tiles that occupies nearly all multiprocessors (132 on an H100 or H200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """The tile of decode attention. `keys`: keys per tile; `splits`: number of parts into which a
    row's keys are split.
    """

    splits: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """The tile of chunk attention. `rows`: rows (token, query of one key head) per tile; `keys`:
    keys per tile.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTile:
    """The tile of a projection of few rows. `splits`: number of parts into which the sum is
    split.
    """

    outputs: int
    inputs: int
    splits: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """Tile of a projection of one row: `outputs` x `inputs` weights at a time."""

    outputs: int
    inputs: int
    warps: int


def row_tile(*, num_in: int, is_gated: bool, weight_dtype: torch.dtype) -> RowTile:
    """Return the tile of a projection of one row.

    It covers all inputs of a short row, and enough of a long row to saturate the memory bandwidth.
    In fp8 it also covers rows of 8,193 to 16,384 inputs, because a loop over such a row is bound by
    instructions. Above 16,384 inputs it is small, because the sums of a large one do not fit in
    registers.
    """
    if weight_dtype.itemsize == 1:
        if 8192 < num_in <= 16384 and weight_dtype.is_floating_point:
            return RowTile(outputs=4, inputs=16384, warps=16)
        if num_in > 4096:
            return RowTile(outputs=2, inputs=2048, warps=4)
        return RowTile(outputs=4, inputs=4096, warps=4 if is_gated else 8)
    is_short = num_in <= 2048
    if is_gated:
        return RowTile(outputs=2, inputs=2048 if is_short else 4096, warps=4 if is_short else 8)
    if is_short:
        return RowTile(outputs=4, inputs=2048, warps=8)
    return RowTile(outputs=4, inputs=1024, warps=4)


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes to capture; the last one is `max_rows`."""
    found = [size for size in BUCKETS if size < max_rows]
    found.extend(range(BUCKETS[-1] + 128, max_rows, 128))
    return (*found, max_rows)


def decode_tile(
    *,
    rows: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    is_long: bool,
    is_fp8: bool = False,
) -> DecodeTile:
    """Return the tile of decode attention: enough programs to fill the device, with few splits when
    the rows alone fill it.

    `is_fp8`: the pages are in 8 bits. Their conversion dominates, so many programs of one warp are
    fastest.
    """
    pairs = rows * kv_heads
    if is_fp8 and head_dim <= 128 and pairs >= (32 if is_long else 33):
        few = 8 if pairs <= 64 else 4 if pairs <= 256 else 2 if pairs <= 512 else 1
        return DecodeTile(splits=32 if is_long else few, keys=32, warps=1, stages=5)
    if is_long:
        splits = 32
    elif pairs <= 32:
        splits = 16
    elif pairs <= 128:
        splits = 4
    else:
        splits = 2 if pairs <= 512 else 1
    if dtype == torch.float32 or head_dim > 128:
        return DecodeTile(splits=splits, keys=32, warps=4, stages=2)
    if is_long:
        return DecodeTile(splits=splits, keys=128, warps=4, stages=3)
    if splits == 16:
        return DecodeTile(splits=splits, keys=64, warps=2, stages=1)
    if splits == 4:
        return DecodeTile(splits=splits, keys=64, warps=4, stages=3)
    if splits == 2:
        wide = head_dim <= 64
        return DecodeTile(splits=2, keys=128 if wide else 64, warps=4 if wide else 2, stages=3)
    return DecodeTile(splits=1, keys=64 if head_dim <= 64 else 32, warps=1, stages=4)


def chunk_tile(*, group: int, head_dim: int, dtype: torch.dtype) -> ChunkTile:
    """Return the tile of chunk attention; it is the same for all chunks of a model."""
    least_rows = max(16, 1 << (group - 1).bit_length())
    if dtype == torch.float32 or head_dim > 128:
        return ChunkTile(rows=max(32, least_rows), keys=32, warps=4, stages=1)
    if head_dim <= 64:
        return ChunkTile(rows=max(64, least_rows), keys=128, warps=4, stages=2)
    return ChunkTile(rows=max(128, least_rows), keys=128, warps=8, stages=3)


def split_tile(
    *, rows: int, num_out: int, num_in: int, dtype: torch.dtype, is_quantised: bool = False
) -> SplitTile | None:
    """Return the tile of a projection; None if the matrix library is as fast, or the kernel does
    not support the shape.

    A product of at most 64 tiles of outputs is split, because its tiles do not fill the device.
    With weights in the model's dtype, the library is as fast for more than 32 rows and, with more
    than 128 tiles, for more than 16. It has no product in which only the weights are in 8 bits, so
    such products use the Triton kernel up to 128 rows. With more rows, it is faster to convert the
    weights and use the library.
    """
    if dtype == torch.float32 or not 1 <= rows <= (128 if is_quantised else 32) or num_out % 64:
        return None
    num_tiles = num_out // 64
    if num_tiles > _NUM_TILES_OF_FULL_DEVICE and rows > 16 and not is_quantised:
        return None
    splits = 4 if num_tiles <= 32 else 2 if num_tiles <= 64 else 1
    if num_in % (128 * splits):
        return None
    if is_quantised:
        return SplitTile(outputs=64, inputs=128, splits=splits, stages=4 if rows <= 32 else 3)
    stages = 5 if 32 < num_tiles <= _NUM_TILES_OF_FULL_DEVICE else 4
    return SplitTile(outputs=64, inputs=128, splits=splits, stages=stages)
