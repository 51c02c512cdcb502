"""Elementwise and row-wise kernels between matrix products: embedding, residual and norm,
activation.

One program processes one token, or a part of its row.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.eight_bit import to_eight_bit


@triton.jit(do_not_specialize=["staged_stride", "table_stride", "num_embeddings"])
def embed_rows(
    staged,
    last_tokens,
    table,
    embedding,
    residual,
    token_slots,
    next_positions,
    staged_stride,
    table_stride,
    num_embeddings,
    block_size: tl.constexpr,
    hidden: tl.constexpr,
    part: tl.constexpr,
):
    """Copy the embedding of each row's input token to `residual`. Store the row's block in the
    device's block table, its slot in `token_slots` and its position + 1 in `next_positions`.

    `staged` int32 [4, stride]: slot, position, token (-1: the token sampled for that position),
    block. The sampled token of position p is at `last_tokens[2 * slot + p % 2]`, so that a repeated
    step finds the same token.
    """
    row = tl.program_id(0)
    slot = tl.load(staged + row)
    position = tl.load(staged + staged_stride + row)
    known = tl.load(staged + 2 * staged_stride + row)
    drawn = tl.load(last_tokens + 2 * slot + position % 2)
    token = tl.where(known >= 0, known, drawn)
    # Another check fails the request of an invalid token id; here it must not cause a read out of
    # bounds.
    token = tl.minimum(tl.maximum(token, 0), num_embeddings - 1).to(tl.int64)
    if tl.program_id(1) == 0:
        block = tl.load(staged + 3 * staged_stride + row)
        tl.store(table + slot.to(tl.int64) * table_stride + position // block_size, block)
        tl.store(token_slots + row, slot.to(tl.int64))
        tl.store(next_positions + row, position.to(tl.int64) + 1)
    column = tl.program_id(1) * part + tl.arange(0, part)
    is_in = column < hidden
    values = tl.load(embedding + token * hidden + column, mask=is_in)
    tl.store(residual + row.to(tl.int64) * hidden + column, values, mask=is_in)


@triton.jit
def add_norm(
    added,
    row_scales,
    column_scales,
    bias,
    residual,
    weight,
    out,
    out_scales,
    eps,
    has_added: tl.constexpr,
    has_scales: tl.constexpr,
    has_bias: tl.constexpr,
    is_quantised: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
):
    """Compute residual += added (if `has_added`) and out = RMSNorm(residual) * weight, with sums in
    float32.

    `has_scales`: `added` is an 8-bit product; its scales and `bias` must still be applied.
    `is_quantised`: out is e4m3 with `out_scales` [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    is_in = column < hidden
    value = tl.load(residual + row * hidden + column, mask=is_in, other=0.0).to(tl.float32)
    if has_added:
        more = tl.load(added + row * hidden + column, mask=is_in, other=0.0).to(tl.float32)
        if has_scales:
            more *= tl.load(row_scales + row)
            more *= tl.load(column_scales + column, mask=is_in, other=0.0)
        if has_bias:
            more += tl.load(bias + column, mask=is_in, other=0.0).to(tl.float32)
        value += more
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * hidden + column, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    normed = (value * scale).to(residual.dtype.element_ty)
    factor = tl.load(weight + column, mask=is_in, other=0.0)
    scaled = (normed * factor).to(residual.dtype.element_ty)
    if is_quantised:
        values, out_scale = to_eight_bit(scaled.to(tl.float32))
        tl.store(out + row * hidden + column, values, mask=is_in)
        tl.store(out_scales + row, out_scale)
    else:
        tl.store(out + row * hidden + column, scaled, mask=is_in)


@triton.jit
def silu_mul(gate_up, out, width: tl.constexpr, part: tl.constexpr):
    """Compute out = silu(gate) * up, of rows [gate | up] of `width` elements each."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    is_in = column < width
    gate = tl.load(gate_up + row * (2 * width) + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * width) + width + column, mask=is_in, other=0.0)
    value = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def flag_finite(
    rows, flags, stride: tl.constexpr, first: tl.constexpr, count: tl.constexpr,
    padded: tl.constexpr,
):  # fmt: skip
    """Write flags uint8 [rows]: 1 if all elements first .. first + count - 1 of a row are finite,
    else 0.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    value = tl.load(rows + row * stride + first + column, mask=column < count, other=0.0)
    # Comparisons with NaN are false.
    is_finite = tl.abs(value.to(tl.float32)) < float("inf")
    tl.store(flags + row, tl.min(is_finite.to(tl.int32), 0).to(tl.uint8))
