"""Quantises rows to e4m3 with one scale each, rescales products of such rows, and converts 8-bit
weights to a wider number format.

Contains four kernels, one program per row or part of a row. Input rows of an 8-bit product are
scaled so that their largest element is the maximum of e4m3. The product is computed from the scaled
numbers; the next kernel multiplies it by the scales of the row and the output channel.
"""

import triton
import triton.language as tl

_GREATEST = tl.constexpr(448.0)


@triton.jit
def to_eight_bit(value):
    """Return the row `value` in e4m3, and its scale (row = e4m3 * scale)."""
    greatest = tl.max(tl.abs(value), 0)
    # A non-finite row has a non-finite scale, so all results computed from it are non-finite.
    scale = tl.where(greatest == 0.0, 1.0, greatest / _GREATEST)
    return (value / scale).to(tl.float8e4nv), scale


@triton.jit
def quantise_rows(x, out, out_scales, hidden: tl.constexpr, width: tl.constexpr):
    """Quantise x [rows, hidden] to out e4m3 [rows, hidden] and out_scales float32 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    is_in = column < hidden
    value = tl.load(x + row * hidden + column, mask=is_in, other=0.0).to(tl.float32)
    values, scale = to_eight_bit(value)
    tl.store(out + row * hidden + column, values, mask=is_in)
    tl.store(out_scales + row, scale)


@triton.jit
def rescale_rows(
    product, row_scales, column_scales, bias, has_bias: tl.constexpr, width: tl.constexpr,
    part: tl.constexpr,
):  # fmt: skip
    """Multiply product [rows, width] by the row and column scales and add `bias`, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    is_in = column < width
    place = product + row * width + column
    value = tl.load(place, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.load(row_scales + row) * tl.load(column_scales + column, mask=is_in, other=0.0)
    if has_bias:
        value += tl.load(bias + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(place, value.to(product.dtype.element_ty), mask=is_in)


@triton.jit
def silu_mul_rows(
    gate_up, row_scales, column_scales, bias, out, out_scales, has_bias: tl.constexpr,
    width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Apply scales and bias to products [rows, gate | up]; write silu(gate) * up to out e4m3 [rows,
    width], and its scales to `out_scales`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    is_in = column < width
    place = gate_up + row * (2 * width) + column
    row_scale = tl.load(row_scales + row)
    gate = tl.load(place, mask=is_in, other=0.0).to(tl.float32)
    gate *= row_scale * tl.load(column_scales + column, mask=is_in, other=0.0)
    up = tl.load(place + width, mask=is_in, other=0.0).to(tl.float32)
    up *= row_scale * tl.load(column_scales + width + column, mask=is_in, other=0.0)
    if has_bias:
        gate += tl.load(bias + column, mask=is_in, other=0.0).to(tl.float32)
        up += tl.load(bias + width + column, mask=is_in, other=0.0).to(tl.float32)
    values, scale = to_eight_bit(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(out + row * width + column, values, mask=is_in)
    tl.store(out_scales + row, scale)


@triton.jit
def widen_weight(weight, scales, out, num_in: tl.constexpr, part: tl.constexpr):
    """Compute out[num_out, num_in] = weight * scales, in the number format of `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    is_in = column < num_in
    value = tl.load(weight + row * num_in + column, mask=is_in, other=0.0).to(tl.float32)
    value *= tl.load(scales + row)
    tl.store(out + row * num_in + column, value.to(out.dtype.element_ty), mask=is_in)
