"""Device functions for the attention kernels: optional norm, then rotary embedding, of a head.

Half-split layout: element i is combined with its partner in the other half of the head, negated for
the first half.
"""

import triton
import triton.language as tl


@triton.jit
def partner_of(column, half: tl.constexpr):
    """Return the column that `column` is combined with in the rotation."""
    return tl.where(column < half, column + half, column - half)


@triton.jit
def angles(cosines, sines, position, column, is_in, half: tl.constexpr):
    """Return the cosine and the signed sine of every column at one position. `cosines`, `sines`:
    tables, float32 [positions, half].
    """
    at = position * half + column % half
    cosine = tl.load(cosines + at, mask=is_in, other=0.0)
    sine = tl.load(sines + at, mask=is_in, other=0.0)
    return cosine, tl.where(column < half, -sine, sine)


@triton.jit
def rotated_row(row, norm, column, is_in, cosine, sine, eps, has_norm: tl.constexpr,
                half: tl.constexpr):  # fmt: skip
    """Return one head [dim], normalised if `has_norm`, then rotated, in float32; `row`: pointer to
    its first element.
    """
    partner = partner_of(column, half)
    value = tl.load(row + column, mask=is_in, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=is_in, other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(value * value, 0) / (2 * half) + eps)
        value *= scale * tl.load(norm + column, mask=is_in, other=0.0).to(tl.float32)
        other *= scale * tl.load(norm + partner, mask=is_in, other=0.0).to(tl.float32)
    return value * cosine + other * sine


@triton.jit
def rotated_rows(rows, norm, column, is_row, is_in, cosine, sine, eps, has_norm: tl.constexpr,
                 half: tl.constexpr):  # fmt: skip
    """Return several heads of one token [heads, dim], normalised if `has_norm`, then rotated, in
    float32; `rows` [heads, 1]: pointers to their first elements.
    """
    partner = partner_of(column, half)
    mask = is_row[:, None] & is_in[None, :]
    value = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(value * value, 1) / (2 * half) + eps)[:, None]
        factor = tl.load(norm + column, mask=is_in, other=0.0).to(tl.float32)
        value *= scale * factor[None, :]
        factor = tl.load(norm + partner, mask=is_in, other=0.0).to(tl.float32)
        other *= scale * factor[None, :]
    return value * cosine[None, :] + other * sine[None, :]
