"""The fused step: a decoder's forward over our kernels, from input tokens to logits.

Owns the order of launches, for the two kinds of step: rows of one token each (`decode`, captured)
and a packed step of any mix of decodes and chunks (`packed`). Knows neither requests nor streams:
launches go to the current stream.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.executor.torch.cuda.kernels.glue import embed_rows
from penstock.executor.torch.cuda.page_attention import Chunks, PageAttention
from penstock.executor.torch.cuda.row_math import Product, RowMath
from penstock.executor.torch.cuda.small_projection import project_row
from penstock.executor.torch.fused_weights import LayerWeights, Projection
from penstock.executor.torch.quantised_weights import FP8

_PART = 1024
"""Elements of a row that one program of an elementwise kernel takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """The parts before and after the layers. `eps` of all norms."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTokens:
    """Per-row values of a step for sampling, int64 [rows].

    `slots`; `next_positions`: of the token that a row's logits predict; `input_ids`: the token
    before it.
    """

    slots: Tensor
    next_positions: Tensor
    input_ids: Tensor

    def first(self, rows: int) -> "RowTokens":
        """The first `rows` of them."""
        return RowTokens(
            slots=self.slots[:rows],
            next_positions=self.next_positions[:rows],
            input_ids=self.input_ids[:rows],
        )

    def take(self, rows: Tensor) -> "RowTokens":
        """Those at `rows` int32 [m]."""
        return RowTokens(
            slots=self.slots.index_select(0, rows),
            next_positions=self.next_positions.index_select(0, rows),
            input_ids=self.input_ids.index_select(0, rows),
        )


def empty_row_tokens(num_rows: int, device: torch.device) -> RowTokens:
    """Memory for `num_rows` rows."""

    def ints() -> Tensor:
        return torch.empty(num_rows, dtype=torch.long, device=device)

    return RowTokens(slots=ints(), next_positions=ints(), input_ids=ints())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedHidden:
    """A packed step before its head: of each token the residual and what is still to be added.

    `keys_and_values` [tokens, 2 x kv elements]: of the last layer, before rotation; any invalid
    value of an earlier layer shows there, also for tokens without sampled logits.
    """

    residual: Tensor
    added: Product
    keys_and_values: Tensor


class FusedModel:
    """One model's weights and pages. `last_tokens` int32 [2 * slots]: see `embed_rows`."""

    def __init__(
        self,
        layers: tuple[LayerWeights, ...],
        ends: Ends,
        attention: PageAttention,
        table: Tensor,
        last_tokens: Tensor,
        *,
        block_size: int,
    ) -> None:
        self.ends = ends
        self._layers = layers
        self._attention = attention
        self._table = table
        self._last_tokens = last_tokens
        self._block_size = block_size
        self._hidden = ends.embedding.shape[1]
        self._dtype = ends.embedding.dtype
        self._math = RowMath(
            hidden=self._hidden,
            eps=ends.eps,
            dtype=self._dtype,
            device=ends.embedding.device,
            is_fp8=layers[0].qkv.weight.dtype == FP8,
        )
        self._has_biases = any(
            projection.bias is not None
            for layer in layers
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    @property
    def tokens_a_tile(self) -> int:
        """Tokens of a chunk that one program takes."""
        return self._attention.tokens_a_tile

    @property
    def vocab_size(self) -> int:
        """Logits of one row."""
        return self.ends.head.shape[0]

    def decode(
        self, staged: Tensor, tokens: RowTokens, logits: Tensor, *, rows: int, is_long: bool
    ) -> None:
        """Rows of one token each: `staged` int32 [4, ...] in, `tokens` and `logits` [rows] out."""
        tile = self._attention.tile_for(rows, is_long=is_long)
        residual = self._embed(staged, tokens, rows)
        if rows == 1 and not self._has_biases and self._dtype != torch.float32:
            self._decode_row(staged, residual, logits, is_long=is_long)
            return

        def attend(index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
            out = self._attended(rows)
            self._attention.decode(index, layer, qkv, out, staged, rows=rows, tile=tile)
            return out

        added = self._run_layers(residual, attend)
        normed = self._math.norm(added, residual, self.ends.final_norm, is_last=True)
        torch.mm(normed.values, self.ends.head.T, out=logits)

    def packed(
        self, staged: Tensor, tokens: RowTokens, chunks: Chunks, *, num_decodes: int
    ) -> PackedHidden:
        """`num_decodes` rows of one token, then `chunks`, through one forward."""
        num_tokens = num_decodes + chunks.num_tokens
        tile = self._attention.tile_for(max(num_decodes, 1), is_long=False)
        residual = self._embed(staged, tokens, num_tokens)
        last = len(self._layers) - 1
        first_key = self._attention.layout.num_query_elements
        kept: list[Tensor] = []

        def attend(index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
            out = self._attended(num_tokens)
            if num_decodes:
                self._attention.decode(index, layer, qkv, out, staged, rows=num_decodes, tile=tile)
            self._attention.chunks(index, layer, qkv, out, staged, chunks)
            if index == last:
                kept.append(qkv[:, first_key:])
            return out

        added = self._run_layers(residual, attend)
        return PackedHidden(residual=residual, added=added, keys_and_values=kept[0])

    def head(self, hidden: PackedHidden, rows: Tensor) -> Tensor:
        """Logits of the packed tokens `rows` int32 [m]."""
        residual = hidden.residual.index_select(0, rows)
        added = hidden.added.take(rows)
        normed = self._math.norm(added, residual, self.ends.final_norm, is_last=True)
        return torch.mm(normed.values, self.ends.head.T)

    def _embed(self, staged: Tensor, tokens: RowTokens, rows: int) -> Tensor:
        embedding = self.ends.embedding
        residual = torch.empty((rows, self._hidden), dtype=embedding.dtype, device=embedding.device)
        embed_rows[(rows, -(-self._hidden // _PART))](
            staged,
            staged.stride(0),
            self._last_tokens,
            self._table,
            self._table.stride(0),
            embedding,
            embedding.shape[0],
            residual,
            tokens.slots,
            tokens.next_positions,
            tokens.input_ids,
            block_size=self._block_size,
            hidden=self._hidden,
            part=_PART,
            num_warps=4,
        )
        return residual

    def _run_layers(
        self, residual: Tensor, attend: Callable[[int, LayerWeights, Tensor], Tensor]
    ) -> Product:
        """All layers over `residual`; returns what the last one adds to it."""
        math = self._math
        added: Product | None = None
        for index, layer in enumerate(self._layers):
            normed = math.norm(added, residual, layer.input_norm)
            attended = attend(index, layer, math.whole(math.project(normed, layer.qkv)))
            attended_sum = math.project(math.rows(attended), layer.out)
            normed = math.norm(attended_sum, residual, layer.output_norm)
            added = math.project(math.activate(math.project(normed, layer.gate_up)), layer.down)
        if added is None:
            raise ValueError("a model without layers")
        return added

    def _decode_row(
        self, staged: Tensor, residual: Tensor, logits: Tensor, *, is_long: bool
    ) -> None:
        """One row: five launches a layer, each limited by memory bandwidth."""
        eps = self.ends.eps
        tile = self._attention.tile_for(1, is_long=is_long)
        like = residual
        for index, layer in enumerate(self._layers):
            qkv = torch.empty((1, len(layer.qkv.weight)), dtype=like.dtype, device=like.device)
            project_row(residual, layer.qkv, qkv, norm=layer.input_norm, eps=eps)
            attended = self._attended(1)
            self._attention.decode(index, layer, qkv, attended, staged, rows=1, tile=tile)
            project_row(attended, layer.out, residual, is_added=True)
            width = layer.down.weight.shape[1]
            activated = torch.empty((1, width), dtype=like.dtype, device=like.device)
            project_row(
                residual,
                layer.gate_up,
                activated,
                norm=layer.output_norm,
                eps=eps,
                is_gated=True,
            )
            project_row(activated, layer.down, residual, is_added=True)
        head = Projection(weight=self.ends.head, bias=None)
        project_row(residual, head, logits, norm=self.ends.final_norm, eps=eps)

    def _attended(self, rows: int) -> Tensor:
        return torch.empty(
            (rows, self._attention.layout.num_query_elements),
            dtype=self._dtype,
            device=self.ends.embedding.device,
        )
