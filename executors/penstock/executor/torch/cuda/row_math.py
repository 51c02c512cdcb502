"""The operations on a step's rows between attentions: norms, projections, the activation.

Owns the two ways to multiply: rows in the model's number format, and rows in 8 bits against fp8
weights, whose scales are kept in a `Product` for its next reader.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.kernels.eight_bit import (
    quantise_rows,
    rescale_rows,
    silu_mul_rows,
)
from penstock.executor.torch.cuda.kernels.glue import add_norm, silu_mul
from penstock.executor.torch.cuda.small_projection import SmallProjection
from penstock.executor.torch.fused_weights import Projection
from penstock.executor.torch.quantised_weights import FP8

_PART = 1024
"""Elements of a row that one program of an elementwise kernel takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`values` [rows, n]; `scales` float32 [rows] of rows in 8 bits, else None."""

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Rows after a projection, `values` [rows, out].

    `scales` float32 [rows]: they, `of`'s scales and its bias are still to be applied; None: they
    are whole.
    """

    values: Tensor
    scales: Tensor | None
    of: Projection

    def take(self, rows: Tensor) -> "Product":
        """Those at `rows` int32 [m]."""
        scales = None if self.scales is None else self.scales.index_select(0, rows)
        return Product(self.values.index_select(0, rows), scales, self.of)


class RowMath:
    """The arithmetic of one model's rows. `is_fp8`: its layers' weights are in fp8."""

    def __init__(
        self, *, hidden: int, eps: float, dtype: torch.dtype, device: torch.device, is_fp8: bool
    ) -> None:
        self._hidden = hidden
        self._eps = eps
        self._dtype = dtype
        self._is_fp8 = is_fp8
        self._norm_width = _padded(hidden)
        self._norm_warps = 4 if hidden <= 2048 else 8
        self._projection = SmallProjection(dtype=dtype, device=device)
        self._one = torch.ones((), device=device)

    def norm(
        self, added: Product | None, residual: Tensor, weight: Tensor, *, is_last: bool = False
    ) -> Rows:
        """residual += added; the norm of it, for a projection or, `is_last`, for the head."""
        is_quantised = self._is_fp8 and not is_last
        out = torch.empty_like(residual, dtype=FP8 if is_quantised else None)
        out_scales = self._scales(residual) if is_quantised else None
        scales = None if added is None else added.scales
        column_scales = None if added is None or scales is None else added.of.scale
        bias = None if added is None or scales is None else added.of.bias
        add_norm[(len(residual),)](
            residual if added is None else added.values,
            _or(scales, residual),
            _or(column_scales, residual),
            _or(bias, residual),
            residual,
            weight,
            out,
            _or(out_scales, residual),
            self._eps,
            has_added=added is not None,
            has_scales=scales is not None,
            has_bias=bias is not None,
            is_quantised=is_quantised,
            hidden=self._hidden,
            width=self._norm_width,
            num_warps=self._norm_warps,
        )
        return Rows(out, out_scales)

    def project(self, rows: Rows, projection: Projection) -> Product:
        """Rows times the weight."""
        if rows.scales is None:
            values = self._projection.project(rows.values, projection)
            return Product(values, None, projection)
        # Unscaled: a call that scales by row and column takes twice as long. There is no public
        # name for it.
        values = torch._scaled_mm(  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            rows.values,
            projection.weight.T,
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )
        return Product(values, rows.scales, projection)

    def activate(self, gate_up: Product) -> Rows:
        """silu(gate) * up."""
        values = gate_up.values
        rows, width = values.shape[0], values.shape[1] // 2
        if gate_up.scales is None:
            out = torch.empty((rows, width), dtype=values.dtype, device=values.device)
            silu_mul[(rows, -(-width // _PART))](values, out, width=width, part=_PART, num_warps=4)
            return Rows(out)
        out = torch.empty((rows, width), dtype=FP8, device=values.device)
        out_scales = self._scales(values)
        projection = gate_up.of
        silu_mul_rows[(rows,)](
            values,
            gate_up.scales,
            projection.scale,
            _or(projection.bias, values),
            out,
            out_scales,
            has_bias=projection.bias is not None,
            width=width,
            padded=_padded(width),
            num_warps=8,
        )
        return Rows(out, out_scales)

    def rows(self, x: Tensor) -> Rows:
        """`x` [rows, n] in the format of a projection's input."""
        if not self._is_fp8:
            return Rows(x)
        out = torch.empty_like(x, dtype=FP8)
        out_scales = self._scales(x)
        quantise_rows[(len(x),)](
            x, out, out_scales, hidden=x.shape[1], width=_padded(x.shape[1]), num_warps=4
        )
        return Rows(out, out_scales)

    def whole(self, product: Product) -> Tensor:
        """The product with all its scales, [rows, out]."""
        values, projection = product.values, product.of
        if product.scales is not None:
            width = values.shape[1]
            rescale_rows[(len(values), -(-width // _PART))](
                values,
                product.scales,
                projection.scale,
                _or(projection.bias, values),
                has_bias=projection.bias is not None,
                width=width,
                part=_PART,
                num_warps=4,
            )
        return values

    def _scales(self, x: Tensor) -> Tensor:
        return torch.empty(len(x), device=x.device)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """A valid pointer for an optional tensor that the kernel does not read."""
    return other if given is None else given
