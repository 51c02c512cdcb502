"""Projections of few rows, for which matrix libraries do not reach the full memory bandwidth.

Contains two kernels over weights [out, in]. `split_projection` (up to 32 rows, 128 with 8-bit
weights) uses the weights as the tall operand of the tensor cores and splits the sum among programs;
the last program to finish adds the parts. `row_projection` (one row) uses no tensor cores, and
includes the preceding norm, or the residual or activation that follows, in the same launch.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def split_projection(
    x,
    weight,
    scales,
    out,
    parts,
    counters,
    num_rows,
    has_scales: tl.constexpr,
    num_out: tl.constexpr,
    num_in: tl.constexpr,
    row_width: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute out[rows, num_out] = x[rows, num_in] @ weight^T. `counters` must be
    zero, and are zero again afterwards.

    `has_scales`: the weights are in 8 bits, with `scales` [num_out].
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, row_width)
    column = tile * tile_out + tl.arange(0, tile_out)
    offset = tl.arange(0, tile_in)
    is_row = row < num_rows
    per_split: tl.constexpr = num_in // splits
    summed = tl.zeros([tile_out, row_width], tl.float32)
    for first in tl.range(split * per_split, (split + 1) * per_split, tile_in, num_stages=stages):
        weights = tl.load(weight + column[:, None] * num_in + (first + offset)[None, :])
        values = tl.load(
            x + row[None, :] * num_in + (first + offset)[:, None],
            mask=is_row[None, :],
            other=0.0,
        )
        summed = tl.dot(weights.to(values.dtype), values, summed, input_precision=precision)
    if has_scales:
        summed *= tl.load(scales + column, mask=column < num_out, other=0.0)[:, None]
    mask = is_row[None, :] & (column[:, None] < num_out)
    place = out + row[None, :] * num_out + column[:, None]
    if splits == 1:
        tl.store(place, summed.to(out.dtype.element_ty), mask=mask)
    else:
        part = parts + tile * splits * (row_width * tile_out)
        inner = tl.arange(0, tile_out)[:, None] + row[None, :] * tile_out
        tl.store(part + split * (row_width * tile_out) + inner, summed, mask=mask)
        tl.debug_barrier()
        num_before = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if num_before == splits - 1:
            tl.debug_barrier()
            whole = tl.load(part + inner, mask=mask, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, splits):
                whole += tl.load(
                    part + other * (row_width * tile_out) + inner,
                    mask=mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(place, whole.to(out.dtype.element_ty), mask=mask)
            tl.store(counters + tile, 0)


@triton.jit
def row_projection(
    x,
    weight,
    scales,
    norm,
    out,
    eps,
    num_out: tl.constexpr,
    num_in: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
    is_added: tl.constexpr,
    has_scales: tl.constexpr,
):
    """Compute out[num_out] = f(x[num_in] @ weight^T) for one row.

    `has_scales`: the weights are in 8 bits, with `scales`, one for each row of the weights.
    `is_normed`: x is normalised first. `is_gated`: the weight's 2 * num_out rows are [gate | up], f
    = silu(gate) * up. `is_added`: f adds the previous content of `out`.
    """
    column = tl.program_id(0) * tile_out + tl.arange(0, tile_out)
    offset = tl.arange(0, tile_in)
    # Masked: the tile may exceed the row, and the number of rows need not be a multiple of the
    # tile.
    is_out = column < num_out
    place = weight + column[:, None].to(tl.int64) * num_in + offset[None, :]
    mask = is_out[:, None] & (offset < num_in)[None, :]
    # Prefetch: the next tile of weights is loaded before this one is used.
    weights = tl.load(place, mask=mask, other=0.0)
    if is_gated:
        ups = tl.load(place + num_out * num_in, mask=mask, other=0.0)
    summed = tl.zeros([tile_out, tile_in], tl.float32)
    gated = tl.zeros([tile_out, tile_in], tl.float32)
    squares = tl.zeros([tile_in], tl.float32)
    for first in range(0, num_in, tile_in):
        at = first + offset
        is_in = at < num_in
        value = tl.load(x + at, mask=is_in, other=0.0).to(tl.float32)
        if is_normed:
            squares += value * value
            value *= tl.load(norm + at, mask=is_in, other=0.0).to(tl.float32)
        summed += weights.to(tl.float32) * value[None, :]
        mask = is_out[:, None] & (at + tile_in < num_in)[None, :]
        place += tile_in
        if num_in > tile_in:
            weights = tl.load(place, mask=mask, other=0.0)
        if is_gated:
            gated += ups.to(tl.float32) * value[None, :]
            if num_in > tile_in:
                ups = tl.load(place + num_out * num_in, mask=mask, other=0.0)
    result = tl.sum(summed, 1)
    scale = tl.rsqrt(tl.sum(squares, 0) / num_in + eps) if is_normed else 1.0
    result *= scale
    if has_scales:
        result *= tl.load(scales + column, mask=is_out, other=0.0)
    if is_gated:
        other = tl.sum(gated, 1) * scale
        if has_scales:
            other *= tl.load(scales + num_out + column, mask=is_out, other=0.0)
        result = result / (1.0 + tl.exp(-result)) * other
    if is_added:
        result += tl.load(out + column, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=is_out)
