"""Attention over pages: the arithmetic of one layer in one step.

Owns the two forms, rows of one token in length groups and chunks one by one. Does not know
transformers; `attention_interface` brings the calls here. Plain tensor operations, the same on
every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.executor.torch.kv_pages import HeadShape, KVPages
from penstock.executor.torch.step_inputs import RowGroup, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are made. `window` 0 and `softcap` 0 mean off; `sinks` [query heads] or None:
    a logit per head that takes part in the softmax and attends to nothing."""

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True when the scores are products and nothing more."""
        return self.softcap == 0.0 and self.sinks is None


class PagedAttention:
    """Writes a layer's new keys and values to the pages and attends over them."""

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._gathered = torch.empty(0, dtype=pages.dtype, device=pages.device)

    def attend(
        self,
        layer: int,
        step: StepInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, H, D], rotated; returns [T, Hq, D]."""
        shape = self._pages.shapes[layer]
        key_rows, value_rows = step.token_rows(shape)
        tokens = self._pages.token_rows(layer)
        tokens.index_copy_(0, key_rows, key.reshape(-1, shape.head_dim))
        tokens.index_copy_(0, value_rows, value.reshape(-1, shape.head_dim))
        groups = step.row_groups(shape, scoring.window) if step.num_singles else ()
        if len(groups) == 1 and not step.chunks:
            return self._attend_group(layer, groups[0], query, scoring)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            rows = slice(group.first, group.last)
            out[rows] = self._attend_group(layer, group, query[rows], scoring)
        for index, chunk in enumerate(step.chunks):
            rows = slice(chunk.first, chunk.last)
            own = (key[rows], value[rows])
            out[rows] = self._attend_chunk(layer, step, index, query[rows], own, scoring)
        return out

    def _gather(self, layer: int, page_rows: Tensor) -> Tensor:
        """Pages into a buffer that layers and groups share: it stays in the processor's cache."""
        pages = self._pages.block_rows(layer)
        num_elements = page_rows.numel() * pages.shape[1]
        if self._gathered.numel() < num_elements:
            self._gathered = torch.empty(
                num_elements * 5 // 4, dtype=pages.dtype, device=pages.device
            )
        out = self._gathered[:num_elements].view(-1, pages.shape[1])
        return torch.index_select(pages, 0, page_rows, out=out)

    def _attend_group(self, layer: int, group: RowGroup, query: Tensor, scoring: Scoring) -> Tensor:
        """query [rows, Hq, D]; the queries of one key head stand together as rows of a matrix."""
        num_rows, num_queries, head_dim = query.shape
        shape = self._pages.shapes[layer]
        num_matrices = num_rows * shape.num_heads
        gathered = self._gather(layer, group.page_rows)
        keys, values = gathered.view(2, num_matrices, -1, head_dim)
        queries = query.reshape(num_matrices, -1, head_dim)
        per_head = (num_rows, shape.num_heads, num_queries // shape.num_heads, -1)
        if scoring.is_plain and query.dtype != torch.float32:
            scores = self._centred_scores(queries, keys, group.mask, per_head, scoring.scaling)
            weights = torch.softmax(scores, -1, dtype=torch.float32)
        else:
            scores = torch.bmm(queries, keys.transpose(1, 2)).view(per_head)
            weights = _softmax(scores.float(), group.mask, scoring, shape)
        weights = weights.to(query.dtype).view(num_matrices, -1, keys.shape[1])
        return torch.bmm(weights, values).view(query.shape)

    def _centred_scores(
        self,
        queries: Tensor,
        keys: Tensor,
        mask: Tensor,
        per_head: tuple[int, int, int, int],
        scaling: float,
    ) -> Tensor:
        """Scores less a guess of each row's greatest, masked, [matrices, queries, keys].

        A batched product in bfloat16 sums in float32 but rounds its result to 8 bits, which is
        coarse for a large score. What a softmax needs exactly are the differences to the greatest:
        so a constant near it, found among the first block's keys (where attention gathers), is
        subtracted before the rounding.
        """
        width = self._pages.block_size
        first = keys[:, :width].contiguous().transpose(1, 2)
        guess = torch.bmm(queries, first).mul_(scaling).view(per_head)
        # Only keys that count: the rest of a block is whatever its last owner left there. The first
        # block of a row always has one.
        centre = (guess + mask[..., :width]).amax(-1, keepdim=True)
        offset = mask - centre
        return torch.baddbmm(
            offset.view(len(queries), -1, keys.shape[1]),
            queries,
            keys.transpose(1, 2),
            alpha=scaling,
        )

    def _attend_chunk(
        self,
        layer: int,
        step: StepInputs,
        index: int,
        query: Tensor,
        own: tuple[Tensor, Tensor],
        scoring: Scoring,
    ) -> Tensor:
        """query [n, Hq, D], `own` keys and values [n, H, D]; returns [n, Hq, D]."""
        shape = self._pages.shapes[layer]
        chunk = step.chunks[index]
        queries = query.transpose(0, 1).unsqueeze(0)
        is_grouped = query.shape[1] != shape.num_heads
        is_whole = chunk.start == 0 and (scoring.window == 0 or scoring.window >= chunk.end)
        if is_whole and scoring.is_plain:
            # The whole past is in this very chunk: nothing to gather.
            keys, values = (part.transpose(0, 1).unsqueeze(0) for part in own)
            attended = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=True,
                scale=scoring.scaling,
                enable_gqa=is_grouped,
            )
            return attended[0].transpose(0, 1)
        past = step.chunk_keys(index, shape, scoring.window)
        gathered = self._gather(layer, past.page_rows)
        keys, values = gathered.view(2, 1, shape.num_heads, -1, shape.head_dim)
        if scoring.is_plain:
            attended = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=past.mask[None, None],
                scale=scoring.scaling,
                enable_gqa=is_grouped,
            )
            return attended[0].transpose(0, 1)
        num_tokens, num_queries, head_dim = query.shape
        grouped = queries.reshape(1, shape.num_heads, -1, num_tokens, head_dim)
        scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
        weights = _softmax(scores[0].float(), past.mask, scoring, shape).to(query.dtype)
        attended = torch.matmul(weights, values[0].unsqueeze(1))
        return attended.reshape(num_queries, num_tokens, head_dim).transpose(0, 1)


def _softmax(scores: Tensor, mask: Tensor, scoring: Scoring, shape: HeadShape) -> Tensor:
    """Weights in float32 over the last axis of raw products, after scale, cap, mask and sinks.

    Rows [rows, heads, queries per head, keys] or a chunk [heads, queries per head, tokens, keys].
    """
    scores = scores * scoring.scaling
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask
    if scoring.sinks is None:
        return torch.softmax(scores, -1)
    sinks = scoring.sinks.float().view(shape.num_heads, -1)
    if mask.dim() == 2:
        sinks = sinks.unsqueeze(-1)
    sinks = sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights: Tensor = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    return weights
