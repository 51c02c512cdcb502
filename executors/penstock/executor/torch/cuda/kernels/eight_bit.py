"""Quantises rows to e4m3 with one scale each, and rescales products of such rows.

Owns three kernels, one program per row. Rows that enter an 8-bit product are scaled so that their
greatest element is the maximum of e4m3. The product is that of the scaled numbers; the kernel that
reads it next multiplies it by the scales of the row and the output channel.
"""

import triton
import triton.language as tl

_GREATEST = tl.constexpr(448.0)


@triton.jit
def to_eight_bit(value):
    """Return a row in e4m3, and the scale to multiply it by."""
    greatest = tl.max(tl.abs(value), 0)
    # The scale of a row that is not finite is not finite either, nor is any result of it.
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
    """Multiply product [rows, width] by its scales and add `bias`, in place."""
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
    """Write silu(gate) * up of products [rows, gate | up] to out e4m3 [rows, width] and its
    scales.
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
