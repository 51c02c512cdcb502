"""Projections of a step: Triton kernels for few rows, otherwise the matrix library.

The library is slow for few rows. For the library, 8-bit weights are converted to the dtype of the
rows. Holds the scratch memory of partial sums.
"""

import torch
from torch import Tensor

from penstock.executor.torch.cuda.kernels.projection import row_projection, split_projection
from penstock.executor.torch.cuda.tiles import row_tile, split_tile
from penstock.executor.torch.cuda.wide_weights import WeightWidener
from penstock.executor.torch.fused_weights import Projection

_MAX_ROWS = 128
_MAX_SPLIT_TILES = 64
"""Maximum number of output tiles of a split product; each has at most four partial sums."""


class StepProjection:
    """Computes x @ weight^T + bias for steps of any size."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._parts = torch.empty(_MAX_SPLIT_TILES * 4 * 64 * _MAX_ROWS, device=device)
        self._widener = WeightWidener()
        self._counters = torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device)

    def project(self, x: Tensor, projection: Projection, out: Tensor) -> Tensor:
        """Apply the projection to x [rows, in]; return `out` [rows, out]."""
        weight = projection.weight
        num_out, num_in = weight.shape
        rows = x.shape[0]
        is_quantised = projection.scale is not None
        tile = split_tile(
            rows=rows,
            num_out=num_out,
            num_in=num_in,
            dtype=self._dtype,
            is_quantised=is_quantised,
        )
        if tile is None or (projection.bias is not None and not is_quantised):
            widened = self._widener.widen(projection) if is_quantised else projection.transposed
            if projection.bias is None:
                return torch.mm(x, widened, out=out)
            return torch.addmm(projection.bias, x, widened, out=out)
        split_projection[(num_out // tile.outputs, tile.splits)](
            x,
            weight,
            weight if projection.scale is None else projection.scale,
            out,
            self._parts,
            self._counters,
            rows,
            has_scales=is_quantised,
            num_out=num_out,
            num_in=num_in,
            row_width=max(16, 1 << (rows - 1).bit_length()),
            tile_out=tile.outputs,
            tile_in=tile.inputs,
            splits=tile.splits,
            stages=tile.stages,
            precision="ieee" if self._dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        return out if projection.bias is None else out.add_(projection.bias)


def project_row(
    x: Tensor,
    projection: Projection,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    is_added: bool = False,
) -> None:
    """Project the row `x` [1, in] into `out` [1, out] in one launch; the bias is ignored. For the
    options see `row_projection`.
    """
    weight = projection.weight
    num_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    num_in = weight.shape[1]
    tile = row_tile(num_in=num_in, is_gated=is_gated, weight_dtype=weight.dtype)
    row_projection[(-(-num_out // tile.outputs),)](
        x,
        weight,
        x if projection.scale is None else projection.scale,
        x if norm is None else norm,
        out,
        eps,
        num_out=num_out,
        num_in=num_in,
        tile_out=tile.outputs,
        tile_in=tile.inputs,
        is_normed=norm is not None,
        is_gated=is_gated,
        is_added=is_added,
        has_scales=projection.scale is not None,
        num_warps=tile.warps,
    )
