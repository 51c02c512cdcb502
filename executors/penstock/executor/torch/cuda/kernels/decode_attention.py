"""Attention of single-token rows over pages: one launch per layer.

One kernel normalises and rotates query and key, writes key and value, computes the scores, and adds
the partial sums if a row's keys are split among programs (the last program to finish adds them). A
program (key head, row, split) processes all queries of one key head. Loads are masked, so the
content of a page after the end of a sequence is never read.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.rotary import angles, rotated_row, rotated_rows


@triton.jit
def _write_key_value(qkv_row, key_norm, page, column, is_in, cosine, sine, eps, head,
                     key_scale, value_scale, has_norm: tl.constexpr, kv_heads: tl.constexpr,
                     group: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr):  # fmt: skip
    """Normalise (`has_norm`) and rotate one head's new key; write the key and the value, divided by
    their scales. `page` points at the key's first element.
    """
    half: tl.constexpr = dim // 2
    key_row = qkv_row + (group * kv_heads + head) * dim
    key = rotated_row(key_row, key_norm, column, is_in, cosine, sine, eps, has_norm, half)
    value_row = qkv_row + ((group + 1) * kv_heads + head) * dim
    value = tl.load(value_row + column, mask=is_in).to(tl.float32)
    key = (key / key_scale).to(page.dtype.element_ty)
    value = (value / value_scale).to(page.dtype.element_ty)
    tl.store(page + column, key, mask=is_in)
    tl.store(page + kv_heads * block_size * dim + column, value, mask=is_in)


@triton.jit
def _attend(query, pages, table_row, head, start, end, column, is_in, scale2,
            kv_heads: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr,
            tile: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """Attend to keys start .. end - 1; return, for each query, the maximum score, the sum of the
    weights and the weighted sum of the values.
    """
    greatest = tl.full([query.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros([query.shape[0], query.shape[1]], tl.float32)
    offset = tl.arange(0, tile)
    for first in range(start, end, tile):
        index = first + offset
        is_key = index < end
        block = tl.load(table_row + index // block_size, mask=is_key, other=0).to(tl.int64)
        at = (block * (2 * kv_heads) + head) * (block_size * dim) + (index % block_size) * dim
        key_places = pages + at[None, :] + column[:, None]
        value_places = pages + kv_heads * block_size * dim + at[:, None] + column[None, :]
        if dim == column.shape[0]:
            keys = tl.load(key_places, mask=is_key[None, :], other=0.0)
            values = tl.load(value_places, mask=is_key[:, None], other=0.0)
        else:
            keys = tl.load(key_places, mask=is_key[None, :] & is_in[:, None], other=0.0)
            values = tl.load(value_places, mask=is_key[:, None] & is_in[None, :], other=0.0)
        # Pages may be in 8 bits.
        keys = keys.to(query.dtype)
        values = values.to(query.dtype)
        scores = tl.dot(query, keys, input_precision=precision) * scale2
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        risen = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp2(scores - risen[:, None])
        fall = tl.exp2(greatest - risen)
        summed = tl.dot(
            weights.to(values.dtype), values, summed * fall[:, None], input_precision=precision
        )
        total = total * fall + tl.sum(weights, 1)
        greatest = risen
    return greatest, total, summed


@triton.jit
def _add_parts(part_sums, part_scales, out_row, first_part, column, is_in, group: tl.constexpr,
               dim: tl.constexpr, splits: tl.constexpr):  # fmt: skip
    """Combine the partial results of the splits into `out_row`, one query head after another."""
    split = tl.arange(0, splits)
    for query in tl.static_range(group):
        part = (first_part + split) * group + query
        greatest = tl.load(part_scales + part * 2, cache_modifier=".cg")
        total = tl.load(part_scales + part * 2 + 1, cache_modifier=".cg")
        weight = tl.exp2(greatest - tl.max(greatest, 0))
        whole = tl.sum(weight * total, 0)
        sums = tl.load(
            part_sums + part[:, None] * dim + column[None, :],
            mask=(split[:, None] >= 0) & is_in[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        value = tl.sum(sums * weight[:, None], 0) / whole
        tl.store(out_row + query * dim + column, value.to(out_row.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["table_stride", "staged_stride", "window"])
def decode_attention(
    qkv, query_norm, key_norm, pages, page_scales, table, staged, cosines, sines, out, part_sums,
    part_scales, counters, table_stride, staged_stride, scale2, eps, window,
    has_scales: tl.constexpr, has_norm: tl.constexpr, has_window: tl.constexpr,
    kv_heads: tl.constexpr, group: tl.constexpr, group_width: tl.constexpr, dim: tl.constexpr,
    dim_width: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr, splits: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of single-token rows to the pages and compute their attention: read
    qkv [rows, (group + 2) * kv_heads * dim], write out [rows, group * kv_heads * dim].

    `staged` as in `embed_rows`; pages [block, 2, kv_heads, block_size, dim]; `scale2`: the scale of
    scores, divided by ln 2 for exp2; `window`: number of visible keys of a row. `part_sums`,
    `part_scales`: memory for the partial results of the splits. `counters` must be zero, and are
    zero again afterwards. `has_scales`: page content must be multiplied by `page_scales` [2,
    kv_heads].
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    half: tl.constexpr = dim // 2
    column = tl.arange(0, dim_width)
    is_in = column < dim
    query_head = tl.arange(0, group_width)
    is_query = query_head < group
    # Converting e4m3 to float16 takes one instruction, to bfloat16 several.
    is_fp8: tl.constexpr = pages.dtype.element_ty.primitive_bitwidth == 8
    number: tl.constexpr = tl.float16 if is_fp8 else qkv.dtype.element_ty
    position = tl.load(staged + staged_stride + row)
    table_row = table + tl.load(staged + row).to(tl.int64) * table_stride
    first_key = tl.maximum(position + 1 - window, 0) if has_window else 0
    num_keys = position + 1 - first_key
    per_split = tl.cdiv(tl.cdiv(num_keys, splits), tile) * tile
    start = first_key + split * per_split
    end = tl.minimum(position + 1, start + per_split)

    qkv_row = qkv + row.to(tl.int64) * ((group + 2) * kv_heads * dim)
    cosine, sine = angles(cosines, sines, position, column, is_in, half)
    query_rows = qkv_row + (head * group + query_head)[:, None] * dim
    query = rotated_rows(
        query_rows, query_norm, column, is_query, is_in, cosine, sine, eps, has_norm, half
    )
    key_scale = tl.load(page_scales + head) if has_scales else 1.0
    value_scale = tl.load(page_scales + kv_heads + head) if has_scales else 1.0
    query = (query * key_scale).to(number)
    if (start <= position) & (position < end):
        block = tl.load(table_row + position // block_size).to(tl.int64)
        at = (block * (2 * kv_heads) + head) * (block_size * dim) + (position % block_size) * dim
        _write_key_value(qkv_row, key_norm, pages + at, column, is_in, cosine, sine, eps, head,
                         key_scale, value_scale, has_norm, kv_heads, group, dim,
                         block_size)  # fmt: skip
        tl.debug_barrier()
    greatest, total, summed = _attend(query, pages, table_row, head, start, end, column, is_in,
                                      scale2, kv_heads, dim, block_size, tile,
                                      precision)  # fmt: skip
    summed *= value_scale

    out_row = out + (row.to(tl.int64) * kv_heads + head) * (group * dim)
    mask = is_query[:, None] & is_in[None, :]
    place = query_head[:, None] * dim + column[None, :]
    if splits == 1:
        value = summed / total[:, None]
        tl.store(out_row + place, value.to(out.dtype.element_ty), mask=mask)
    else:
        pair = row * kv_heads + head
        part = (pair * splits + split) * group
        tl.store(part_sums + part * dim + place, summed, mask=mask)
        tl.store(part_scales + (part + query_head) * 2, greatest, mask=is_query)
        tl.store(part_scales + (part + query_head) * 2 + 1, total, mask=is_query)
        tl.debug_barrier()
        num_before = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
        if num_before == splits - 1:
            tl.debug_barrier()
            _add_parts(part_sums, part_scales, out_row, pair * splits, column, is_in, group, dim,
                       splits)  # fmt: skip
            tl.store(counters + pair, 0)
