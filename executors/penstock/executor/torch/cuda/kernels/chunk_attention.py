"""Attention of chunks over pages: one launch rotates and writes all tokens, another computes
the attention of all chunks.

Contains two kernels. `rotate_and_write` processes one token and one key head per program.
`chunk_attention` processes a tile of rows (token, query of one key head) per program and iterates
over the pages of the chunk's request; keys that are visible to every row of the tile need no mask,
other keys are masked as they are loaded.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.rotary import angles, rotated_row, rotated_rows


@triton.jit(do_not_specialize=["staged_stride", "first_token"])
def rotate_and_write(
    qkv,
    query_norm,
    key_norm,
    queries,
    pages,
    page_scales,
    staged,
    cosines,
    sines,
    staged_stride,
    first_token,
    eps,
    has_scales: tl.constexpr,
    has_norm: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_width: tl.constexpr,
    dim: tl.constexpr,
    dim_width: tl.constexpr,
    block_size: tl.constexpr,
):
    """Normalise (`has_norm`) and rotate queries and keys of the tokens from `first_token` on: write
    the queries to [tokens, heads, dim], keys and values to the pages. `staged` as in `embed_rows`.
    `has_scales`: keys and values are divided by `page_scales` [2, kv_heads], queries are multiplied
    by the scales of the keys.
    """
    token = first_token + tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = dim // 2
    column = tl.arange(0, dim_width)
    is_in = column < dim
    query_head = tl.arange(0, group_width)
    is_query = query_head < group
    position = tl.load(staged + staged_stride + token)
    cosine, sine = angles(cosines, sines, position, column, is_in, half)
    qkv_row = qkv + token.to(tl.int64) * ((group + 2) * kv_heads * dim)
    place = (head * group + query_head)[:, None] * dim
    query = rotated_rows(
        qkv_row + place, query_norm, column, is_query, is_in, cosine, sine, eps, has_norm, half
    )
    if has_scales:
        query *= tl.load(page_scales + head)
    tl.store(
        queries + token.to(tl.int64) * (group * kv_heads * dim) + place + column[None, :],
        query.to(queries.dtype.element_ty),
        mask=is_query[:, None] & is_in[None, :],
    )
    key_row = qkv_row + (group * kv_heads + head) * dim
    key = rotated_row(key_row, key_norm, column, is_in, cosine, sine, eps, has_norm, half)
    value = tl.load(qkv_row + ((group + 1) * kv_heads + head) * dim + column, mask=is_in)
    value = value.to(tl.float32)
    if has_scales:
        key /= tl.load(page_scales + head)
        value /= tl.load(page_scales + kv_heads + head)
    block = tl.load(staged + 3 * staged_stride + token).to(tl.int64)
    at = (block * (2 * kv_heads) + head) * (block_size * dim) + (position % block_size) * dim
    tl.store(pages + at + column, key.to(pages.dtype.element_ty), mask=is_in)
    place = pages + kv_heads * block_size * dim + at
    tl.store(place + column, value.to(pages.dtype.element_ty), mask=is_in)


@triton.jit
def _walk(query, pages, table_row, head, start, end, row_position, window, greatest, total, summed,
          column, is_in, scale2, is_masked: tl.constexpr, has_window: tl.constexpr,
          kv_heads: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr,
          tile: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """Attend to the keys start .. end - 1, tile by tile; return the updated state of the online
    softmax (`greatest`, `total`, `summed`).
    """
    offset = tl.arange(0, tile)
    for first in range(start, end, tile):
        index = first + offset
        is_key = index < end
        if is_masked:
            block = tl.load(table_row + index // block_size, mask=is_key, other=0).to(tl.int64)
        else:
            block = tl.load(table_row + index // block_size).to(tl.int64)
        at = (block * (2 * kv_heads) + head) * (block_size * dim) + (index % block_size) * dim
        place = pages + at[:, None] + column[None, :]
        if is_masked or dim != column.shape[0]:
            mask = is_key[:, None] & is_in[None, :]
            keys = tl.load(place, mask=mask, other=0.0)
            values = tl.load(place + kv_heads * block_size * dim, mask=mask, other=0.0)
        else:
            keys = tl.load(place)
            values = tl.load(place + kv_heads * block_size * dim)
        # Pages may be in 8 bits.
        keys = keys.to(query.dtype)
        values = values.to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision=precision) * scale2
        if is_masked:
            is_seen = index[None, :] <= row_position[:, None]
            if has_window:
                is_seen &= index[None, :] > row_position[:, None] - window
            scores = tl.where(is_seen & is_key[None, :], scores, -float("inf"))
        risen = tl.maximum(greatest, tl.max(scores, 1))
        # For a row without visible keys so far the maximum is minus infinity, and minus infinity
        # minus itself is NaN.
        floor = tl.where(risen == -float("inf"), 0.0, risen) if has_window else risen
        weights = tl.exp2(scores - floor[:, None])
        fall = tl.exp2(greatest - floor)
        summed = tl.dot(
            weights.to(values.dtype), values, summed * fall[:, None], input_precision=precision
        )
        total = total * fall + tl.sum(weights, 1)
        greatest = risen
    return greatest, total, summed


@triton.jit(do_not_specialize=["table_stride", "window"])
def chunk_attention(
    queries,
    pages,
    page_scales,
    table,
    tile_chunks,
    tile_tokens,
    chunk_firsts,
    chunk_starts,
    chunk_slots,
    out,
    table_stride,
    scale2,
    window,
    has_scales: tl.constexpr,
    has_window: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_width: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute attention of one chunk tile and key head: `queries`, `out` [tokens, heads * dim].

    Program (t, head) processes the tokens of chunk `tile_chunks[t]` from `tile_tokens[t]` on. Chunk
    c has the packed tokens `chunk_firsts[c] .. chunk_firsts[c + 1] - 1`, the first of them at
    position `chunk_starts[c]` of the request in `chunk_slots[c]`. `scale2`, `window`, `has_scales`:
    see `decode_attention`.
    """
    chunk = tl.load(tile_chunks + tl.program_id(0))
    first_token = tl.load(tile_tokens + tl.program_id(0))
    head = tl.program_id(1)
    packed = tl.load(chunk_firsts + chunk)
    num_tokens = tl.load(chunk_firsts + chunk + 1) - packed
    past = tl.load(chunk_starts + chunk)
    table_row = table + tl.load(chunk_slots + chunk).to(tl.int64) * table_stride
    tokens_per_tile: tl.constexpr = rows // group
    row = tl.arange(0, rows)
    column = tl.arange(0, dim_width)
    is_in = column < dim
    token = first_token + row // group
    is_row = (row < tokens_per_tile * group) & (token < num_tokens)
    place = (packed + token).to(tl.int64) * (group * kv_heads * dim)
    place = (place + (head * group + row % group) * dim)[:, None] + column[None, :]
    mask = is_row[:, None] & is_in[None, :]
    query = tl.load(queries + place, mask=mask, other=0.0)
    position = past + token
    greatest = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, dim_width], tl.float32)
    end = past + tl.minimum(first_token + tokens_per_tile, num_tokens)
    if has_window:
        seen = tl.maximum(past + first_token + 1 - window, 0) // tile * tile
    else:
        seen = (past + first_token + 1) // tile * tile
        greatest, total, summed = _walk(query, pages, table_row, head, 0, seen, position, window,
                                        greatest, total, summed, column, is_in, scale2, False,
                                        False, kv_heads, dim, block_size, tile,
                                        precision)  # fmt: skip
    greatest, total, summed = _walk(query, pages, table_row, head, seen, end, position, window,
                                    greatest, total, summed, column, is_in, scale2, True,
                                    has_window, kv_heads, dim, block_size, tile,
                                    precision)  # fmt: skip
    value = summed / total[:, None]
    if has_scales:
        value *= tl.load(page_scales + kv_heads + head)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)
