"""The operations on a step's rows other than attention: norms, projections, the activation.

Products are computed in the model's dtype or, with fp8 weights, in 8 bits; then a `Product` keeps
the scales for the next operation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.fixed_kernel import FixedKernel
from penstock.executor.torch.cuda.kernels.eight_bit import (
    quantise_rows,
    rescale_rows,
    silu_mul_rows,
)
from penstock.executor.torch.cuda.kernels.glue import add_norm, silu_mul
from penstock.executor.torch.cuda.scratch import Scratch
from penstock.executor.torch.cuda.step_projection import StepProjection
from penstock.executor.torch.fused_weights import Projection
from penstock.executor.torch.quantised_weights import FP8

_PART = 1024
"""Elements of a row per program of an elementwise kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionInput:
    """The input of a projection: `values` [rows, n]; `scales` float32 [rows] in fp8, else None."""

    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The rows that a projection returns, `values` [rows, out].

    `scales` float32 [rows]: these scales, and the scales and bias of `of`, must still be applied;
    None: the values are final.
    """

    values: Tensor
    scales: Tensor | None
    of: Projection

    def take(self, rows: Tensor) -> "Product":
        """Return the rows with the indices `rows` int32 [m]."""
        scales = None if self.scales is None else self.scales.index_select(0, rows)
        return Product(self.values.index_select(0, rows), scales, self.of)


class RowMath:
    """Launches the norms, projections and activations of one model. `is_fp8`: the layers' weights
    are in fp8.

    Results are stored in `scratch`, and are valid until the next call of the same operation, or of
    `project` with the same name. Products with 8-bit rows are new tensors instead.
    """

    def __init__(
        self, *, hidden: int, eps: float, dtype: torch.dtype, device: torch.device, is_fp8: bool
    ) -> None:
        self._hidden = hidden
        self._eps = eps
        self._dtype = dtype
        self._is_fp8 = is_fp8
        self._projection = StepProjection(dtype=dtype, device=device)
        self._one = torch.ones((), device=device)
        self._kernels: dict[tuple[object, ...], FixedKernel] = {}

    def norm(
        self,
        scratch: Scratch,
        added: Product | None,
        residual: Tensor,
        weight: Tensor,
        *,
        is_last: bool = False,
    ) -> ProjectionInput:
        """Add `added`, unless it is None, to `residual` in place; return its RMSNorm times
        `weight`.

        With fp8 weights the result is quantised, with a scale per row, except with `is_last`: the
        LM head is not quantised.
        """
        is_quantised = self._is_fp8 and not is_last
        dtype = FP8 if is_quantised else residual.dtype
        out = scratch.empty("normed", residual.shape, dtype)
        out_scales = self._scales(scratch, "norm scales", residual) if is_quantised else None
        scales = None if added is None else added.scales
        column_scales = None if added is None or scales is None else added.of.scale
        bias = None if added is None or scales is None else added.of.bias
        key = ("norm", added is None, scales is None, bias is None, is_quantised)
        kernel = self._kernels.get(key) or self._add(
            key,
            add_norm,
            has_added=added is not None,
            has_scales=scales is not None,
            has_bias=bias is not None,
            is_quantised=is_quantised,
            hidden=self._hidden,
            width=_padded(self._hidden),
            num_warps=4 if self._hidden <= 2048 else 8,
        )
        kernel.launch(
            (residual.shape[0], 1, 1),
            (
                residual if added is None else added.values,
                _or_default(scales, residual),
                _or_default(column_scales, residual),
                _or_default(bias, residual),
                residual,
                weight,
                out,
                _or_default(out_scales, residual),
            ),
            self._eps,
        )
        return ProjectionInput(out, out_scales)

    def project(
        self, scratch: Scratch, rows: ProjectionInput, projection: Projection, name: str
    ) -> Product:
        """Return `rows` multiplied by the weight of `projection`; scales and bias may still have to
        be applied (see `Product`).

        `name`: name of the result's buffer in `scratch`; unused for 8-bit rows, because their
        result is a new tensor.
        """
        if rows.scales is None:
            shape = (rows.values.shape[0], projection.weight.shape[0])
            out = scratch.empty(name, shape, rows.values.dtype)
            return Product(self._projection.project(rows.values, projection, out), None, projection)
        # Unscaled, because a call that scales by row and column is slower. torch has no public
        # name for this function.
        values = torch._scaled_mm(  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            rows.values,
            projection.transposed,
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )
        return Product(values, rows.scales, projection)

    def activate(self, scratch: Scratch, gate_up: Product) -> ProjectionInput:
        """Return silu(gate) * up of `gate_up` [rows, gate | up], as input rows of a projection."""
        values = gate_up.values
        rows, width = values.shape[0], values.shape[1] // 2
        key: tuple[object, ...] = ("silu", width)
        if gate_up.scales is None:
            out = scratch.empty("activated", (rows, width), values.dtype)
            kernel = self._kernels.get(key) or self._add(
                key, silu_mul, width=width, part=_PART, num_warps=4
            )
            kernel.launch((rows, -(-width // _PART), 1), (values, out))
            return ProjectionInput(out)
        out = scratch.empty("activated", (rows, width), FP8)
        out_scales = self._scales(scratch, "activation scales", values)
        bias = gate_up.of.bias
        key = (*key, bias is None)
        kernel = self._kernels.get(key) or self._add(
            key,
            silu_mul_rows,
            has_bias=bias is not None,
            width=width,
            padded=_padded(width),
            num_warps=8,
        )
        kernel.launch(
            (rows, 1, 1),
            (
                values,
                gate_up.scales,
                _or_default(gate_up.of.scale, values),
                _or_default(bias, values),
                out,
                out_scales,
            ),
        )
        return ProjectionInput(out, out_scales)

    def projection_input(self, scratch: Scratch, x: Tensor) -> ProjectionInput:
        """Convert `x` [rows, n] to the format of a projection's input."""
        if not self._is_fp8:
            return ProjectionInput(x)
        out = scratch.empty("rows", x.shape, FP8)
        out_scales = self._scales(scratch, "row scales", x)
        width = x.shape[1]
        key = ("quantise", width)
        kernel = self._kernels.get(key) or self._add(
            key, quantise_rows, hidden=width, width=_padded(width), num_warps=4
        )
        kernel.launch((x.shape[0], 1, 1), (x, out, out_scales))
        return ProjectionInput(out, out_scales)

    def apply_scales(self, product: Product) -> Tensor:
        """Apply the outstanding scales and bias of a product in place; return its values
        [rows, out].
        """
        values, projection = product.values, product.of
        if product.scales is not None:
            width, bias = values.shape[1], projection.bias
            key = ("rescale", width, bias is None)
            kernel = self._kernels.get(key) or self._add(
                key,
                rescale_rows,
                has_bias=bias is not None,
                width=width,
                part=_PART,
                num_warps=4,
            )
            kernel.launch(
                (values.shape[0], -(-width // _PART), 1),
                (
                    values,
                    product.scales,
                    _or_default(projection.scale, values),
                    _or_default(bias, values),
                ),
            )
        return values

    def _add(self, key: tuple[object, ...], kernel: object, **constants: float) -> FixedKernel:
        found = self._kernels[key] = FixedKernel(kernel, **constants)
        return found

    def _scales(self, scratch: Scratch, name: str, x: Tensor) -> Tensor:
        return scratch.empty(name, (x.shape[0],), torch.float32)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _or_default(given: Tensor | None, other: Tensor) -> Tensor:
    """Return `given`, or `other` if it is None: a valid pointer that the kernel does not read."""
    return other if given is None else given
