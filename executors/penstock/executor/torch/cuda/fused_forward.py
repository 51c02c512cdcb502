"""The fused step: the forward pass of a decoder with Penstock's kernels, from input tokens to
logits.

There are two kinds of steps: rows of one token each (`decode`, captured), and any mix of decodes
and chunks (`packed`). Launches use the current stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.fixed_kernel import FixedKernel
from penstock.executor.torch.cuda.kernels.glue import embed_rows, flag_finite
from penstock.executor.torch.cuda.page_attention import Chunks, PageAttention
from penstock.executor.torch.cuda.row_math import Product, RowMath
from penstock.executor.torch.cuda.scratch import Scratch
from penstock.executor.torch.cuda.step_projection import project_row
from penstock.executor.torch.fused_weights import LayerWeights, Projection
from penstock.executor.torch.quantised_weights import FP8

_PART = 1024
"""Elements of a row per program of an elementwise kernel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterWeights:
    """The weights before and after the layers: `embedding` and `head` [vocabulary, hidden],
    `final_norm` [hidden]. `eps`: the epsilon of all norms.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTokens:
    """Per-row values of a step for sampling, int64 [rows].

    `next_positions`: position of the token that a row's logits predict.
    """

    slots: Tensor
    next_positions: Tensor

    def first(self, rows: int) -> "RowTokens":
        """Return the first `rows` rows."""
        return RowTokens(slots=self.slots[:rows], next_positions=self.next_positions[:rows])


def empty_row_tokens(num_rows: int, device: torch.device) -> RowTokens:
    """Return `RowTokens` of `num_rows` rows with undefined content."""

    def ints() -> Tensor:
        return torch.empty(num_rows, dtype=torch.long, device=device)

    return RowTokens(slots=ints(), next_positions=ints())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedHidden:
    """The output of a packed step's layers, before the LM head: the `residual` of each token, and
    `added`, the last layer's output, not yet added to `residual`.

    `qkv` [tokens, elements]: queries, keys and values of the last layer, before rotation.
    """

    residual: Tensor
    added: Product
    qkv: Tensor


class CudaFusedForward:
    """The forward pass of one model, over its weights and pages. `table` int32 [slots, blocks]: the
    device's block table. `last_tokens` int32 [2 * slots]: see `embed_rows`.

    The constructor raises ValueError if the layers have different number formats.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        outer: OuterWeights,
        attention: PageAttention,
        table: Tensor,
        last_tokens: Tensor,
        *,
        block_size: int,
    ) -> None:
        self.outer = outer
        self._layers = layers
        self._attention = attention
        self._table = table
        self._last_tokens = last_tokens
        self._hidden = outer.embedding.shape[1]
        self._dtype = outer.embedding.dtype
        self._math = RowMath(
            hidden=self._hidden,
            eps=outer.eps,
            dtype=self._dtype,
            device=outer.embedding.device,
            is_fp8=layers[0].qkv.weight.dtype == FP8,
        )
        self._has_biases = any(
            projection.bias is not None for layer in layers for projection in layer.products
        )
        self._embed_kernel = FixedKernel(
            embed_rows, block_size=block_size, hidden=self._hidden, part=_PART, num_warps=4
        )
        stride, first = layers[0].qkv.weight.shape[0], attention.layout.num_query_elements
        self._flag_kernel = FixedKernel(
            flag_finite,
            stride=stride,
            first=first,
            count=stride - first,
            padded=1 << (stride - first - 1).bit_length(),
            num_warps=4,
        )
        if len({_formats(layer) for layer in layers}) > 1:
            raise ValueError("its layers have different number formats")

    @property
    def tokens_per_tile(self) -> int:
        """Number of tokens of a chunk that one program processes."""
        return self._attention.tokens_per_tile

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.outer.head.shape[0]

    def decode(
        self, staged: Tensor, tokens: RowTokens, logits: Tensor, *, rows: int, is_long: bool
    ) -> None:
        """Compute `rows` single-token rows; write `tokens` [rows] and `logits` [rows, vocabulary].
        `staged` int32 [4, ...]: see `embed_rows`. `is_long`: a context exceeds LONG_CONTEXT.
        """
        tile = self._attention.tile_for(rows, is_long=is_long)
        residual = self._embed(staged, tokens, rows)
        scratch = self._scratch()
        if rows == 1 and not self._has_biases and self._dtype != torch.float32:
            self._decode_row(scratch, staged, residual, logits, is_long=is_long)
            return
        attended = self._attended(scratch, rows)

        def attend(index: int, layer: LayerWeights, qkv: Tensor) -> None:
            self._attention.decode(index, layer, qkv, attended, staged, rows=rows, tile=tile)

        added = self._run_layers(scratch, residual, attended, attend)
        self._last(added, residual, out=logits)

    def packed(
        self, staged: Tensor, tokens: RowTokens, chunks: Chunks, *, num_decodes: int
    ) -> PackedHidden:
        """Compute `num_decodes` single-token rows, then `chunks`, in one forward pass; write
        `tokens` and return the layers' output. `staged`: see `embed_rows`.
        """
        num_tokens = num_decodes + chunks.num_tokens
        tile = self._attention.tile_for(max(num_decodes, 1), is_long=False)
        residual = self._embed(staged, tokens, num_tokens)
        scratch = self._scratch()
        attention, attended = self._attention, self._attended(scratch, num_tokens)
        last = len(self._layers) - 1
        kept: list[Tensor] = []

        def attend(index: int, layer: LayerWeights, qkv: Tensor) -> None:
            if num_decodes:
                attention.decode(index, layer, qkv, attended, staged, rows=num_decodes, tile=tile)
            attention.chunks(index, layer, qkv, attended, staged, chunks, scratch)
            if index == last:
                kept.append(qkv)

        added = self._run_layers(scratch, residual, attended, attend)
        return PackedHidden(residual=residual, added=added, qkv=kept[0])

    def head(self, hidden: PackedHidden, rows: Tensor) -> Tensor:
        """Return logits [m, vocabulary] of the packed tokens `rows` int32 [m]."""
        return self._last(hidden.added.take(rows), hidden.residual.index_select(0, rows))

    def finite(self, hidden: PackedHidden) -> Tensor:
        """Return whether each token's keys and values in the last layer are finite, bool [tokens].

        Invalid values of earlier layers propagate to the last layer, also for tokens without
        sampled logits.
        """
        qkv = hidden.qkv
        flags = torch.empty(qkv.shape[0], dtype=torch.uint8, device=qkv.device)
        self._flag_kernel.launch((qkv.shape[0], 1, 1), (qkv, flags))
        return flags.view(torch.bool)

    def _last(self, added: Product, residual: Tensor, out: Tensor | None = None) -> Tensor:
        outer = self.outer
        normed = self._math.norm(self._scratch(), added, residual, outer.final_norm, is_last=True)
        return torch.mm(normed.values, outer.head.T, out=out)

    def _embed(self, staged: Tensor, tokens: RowTokens, rows: int) -> Tensor:
        embedding = self.outer.embedding
        residual = torch.empty((rows, self._hidden), dtype=embedding.dtype, device=embedding.device)
        self._embed_kernel.launch(
            (rows, -(-self._hidden // _PART), 1),
            (
                staged,
                self._last_tokens,
                self._table,
                embedding,
                residual,
                tokens.slots,
                tokens.next_positions,
            ),
            staged.stride(0),
            self._table.stride(0),
            embedding.shape[0],
        )
        return residual

    def _run_layers(
        self,
        scratch: Scratch,
        residual: Tensor,
        attended: Tensor,
        attend: Callable[[int, LayerWeights, Tensor], None],
    ) -> Product:
        """Run all layers over `residual`; return the last layer's output, not yet added to it.

        `attend` takes a layer's index, its weights, and its projections [rows, qkv]; it writes
        `attended`.
        """
        math = self._math
        added: Product | None = None
        for index, layer in enumerate(self._layers):
            normed = math.norm(scratch, added, residual, layer.input_norm)
            attend(index, layer, math.apply_scales(math.project(scratch, normed, layer.qkv, "qkv")))
            # The residual now includes the previous layer's output.
            rows = math.projection_input(scratch, attended)
            added = math.project(scratch, rows, layer.out, "added")
            normed = math.norm(scratch, added, residual, layer.output_norm)
            gate_up = math.project(scratch, normed, layer.gate_up, "gate up")
            added = math.project(scratch, math.activate(scratch, gate_up), layer.down, "added")
        if added is None:
            raise ValueError("a model without layers")
        return added

    def _decode_row(
        self,
        scratch: Scratch,
        staged: Tensor,
        residual: Tensor,
        logits: Tensor,
        *,
        is_long: bool,
    ) -> None:
        """Compute the `logits` of one row with five launches per layer, each limited by memory
        bandwidth.
        """
        eps = self.outer.eps
        tile = self._attention.tile_for(1, is_long=is_long)
        dtype = residual.dtype
        attended = self._attended(scratch, 1)
        for index, layer in enumerate(self._layers):
            qkv = scratch.empty("qkv", (1, len(layer.qkv.weight)), dtype)
            project_row(residual, layer.qkv, qkv, norm=layer.input_norm, eps=eps)
            self._attention.decode(index, layer, qkv, attended, staged, rows=1, tile=tile)
            project_row(attended, layer.out, residual, is_added=True)
            width = layer.down.weight.shape[1]
            activated = scratch.empty("activated", (1, width), dtype)
            project_row(
                residual,
                layer.gate_up,
                activated,
                norm=layer.output_norm,
                eps=eps,
                is_gated=True,
            )
            project_row(activated, layer.down, residual, is_added=True)
        head = Projection(weight=self.outer.head, bias=None)
        project_row(residual, head, logits, norm=self.outer.final_norm, eps=eps)

    def _scratch(self) -> Scratch:
        return Scratch(self.outer.embedding.device)

    def _attended(self, scratch: Scratch, rows: int) -> Tensor:
        shape = (rows, self._attention.layout.num_query_elements)
        return scratch.empty("attended", shape, self._dtype)


def _formats(layer: LayerWeights) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of all tensors of a layer that kernels read; None for an absent tensor."""
    norms = (layer.input_norm, layer.output_norm, layer.query_norm, layer.key_norm)
    read = (
        *(part for one in layer.products for part in (one.weight, one.bias, one.scale)),
        *norms,
    )
    return tuple(None if part is None else part.dtype for part in read)
