"""Computes the attention of one layer in one step, over the pages of the KV cache.

Uses the compiled kernels on a CPU if they are available, else tensor operations; these work on
every device. Tensor operations process single-token rows in groups of similar context length, and
chunks one by one.

Scratch memory is bounded: rows and heads are processed in tiles, so that neither gathered pages nor
scores grow with heads times tokens times context.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from penstock.executor.torch.cpu_kernels.kernels import Kernels, LayerAttention, load
from penstock.executor.torch.cpu_kernels.native import DTYPES, MAX_HEAD_DIM
from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.step_inputs import Chunk, ChunkKeys, RowGroup, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Options of the attention scores.

    Attributes:
        scaling: Factor of the dot products.
        window: The sliding window in tokens; 0: none.
        softcap: The limit of the soft cap; 0: none.
        sinks: [query heads] an extra softmax logit per head that corresponds to no key; None: no
            sinks.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if scores are plain dot products, without softcap or sinks."""
        return self.softcap == 0.0 and self.sinks is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLimits:
    """Size limits of a tile.

    `gathered_bytes`: bytes of gathered pages. `num_scores`: number of float32 scores, if they are
    materialised (soft cap or sinks). `num_mask_elements`: number of mask elements otherwise. A tile
    has at least one token of one key head, whatever its context length.
    """

    gathered_bytes: int
    num_scores: int
    num_mask_elements: int


SCRATCH = {
    # On a CPU about the size of the last-level cache; larger on CUDA, for fewer launches.
    "cpu": TileLimits(gathered_bytes=64 << 20, num_scores=4 << 20, num_mask_elements=16 << 20),
    "cuda": TileLimits(gathered_bytes=1 << 30, num_scores=64 << 20, num_mask_elements=64 << 20),
}
"""Limits by type of device."""


class PagedAttention:
    """Writes a layer's new keys and values to the pages and attends over them."""

    def __init__(
        self, pages: KVPages, scratch: TileLimits | None = None, kernels: Kernels | None = None
    ) -> None:
        """`scratch`: None for the device's default. `kernels`: the kernels for pages on a CPU, None
        for the best available.
        """
        self._pages = pages
        self._kernels = _native_kernels(pages, kernels)
        self._layers: dict[int, tuple[int, Scoring, LayerAttention]] = {}
        self._scratch = scratch or SCRATCH[pages.device.type]
        # Kept between steps, because buffers of changing sizes would fragment the heap.
        self._gathered = torch.empty(0, dtype=pages.dtype, device=pages.device)
        self._scores = torch.empty(0, dtype=torch.float32, device=pages.device)
        self._weights = torch.empty(0, dtype=pages.dtype, device=pages.device)

    def attend(
        self,
        layer: int,
        step: StepInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Write a step's keys and values and attend over the pages: query [T, Hq, D] and key
        [T, H, D] with rotary embeddings, value [T, H, D]; return [T, Hq, D].
        """
        if self._kernels is not None:
            query, key, value = _dense(query), _dense(key), _dense(value)
            out = torch.empty(query.shape, dtype=query.dtype)
            attention = self._layer_attention(self._kernels, layer, query.shape[1], scoring)
            attention.write(step.rows, key, value)
            attention.attend(step.rows, query, out)
            return out
        shape = self._pages.shapes[layer]
        key_rows, value_rows = step.token_rows(shape)
        tokens = self._pages.token_rows(layer)
        tokens.index_copy_(0, key_rows, key.reshape(-1, shape.head_dim))
        tokens.index_copy_(0, value_rows, value.reshape(-1, shape.head_dim))
        groups = step.row_groups(shape, scoring.window) if step.num_singles else ()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            rows = slice(group.first, group.last)
            self._attend_group(layer, group, query[rows], scoring, out[rows])
        for index, chunk in enumerate(step.chunks):
            rows = slice(chunk.first, chunk.last)
            is_whole = chunk.start == 0 and not 0 < scoring.window < chunk.end
            if is_whole and scoring.is_plain:
                # All keys are in this chunk: nothing to gather.
                keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
                out[rows] = _attend_plain(query[rows], keys, values, None, scoring.scaling)
            else:
                max_elements = self._scratch.num_mask_elements
                if not scoring.is_plain:
                    max_elements = self._scratch.num_scores * shape.num_heads // query.shape[1]
                past = step.chunk_keys(index, shape, scoring.window, max_elements)
                self._attend_chunk(layer, chunk, past, query[rows], scoring, out[rows])
        return out

    @property
    def needs_clean_blocks(self) -> bool:
        """True if attention reads memory past a sequence's end; the values there must then be
        finite.
        """
        return self._kernels is None

    def _layer_attention(
        self, kernels: Kernels, layer: int, num_heads: int, scoring: Scoring
    ) -> LayerAttention:
        found = self._layers.get(layer)
        if found is None or found[0] != num_heads or not _is_same(found[1], scoring):
            attention = kernels.layer(
                self._pages.layer(layer),
                num_heads=num_heads,
                scaling=scoring.scaling,
                window=scoring.window,
                softcap=scoring.softcap,
                sinks=scoring.sinks,
            )
            self._layers[layer] = found = num_heads, scoring, attention
        return found[2]

    def _gather(self, layer: int, page_rows: Tensor) -> Tensor:
        """Gather the rows `page_rows` of `KVPages.block_rows` into the buffer that all layers and
        groups share; return them, [rows, elements].
        """
        pages = self._pages.block_rows(layer)
        num_elements = page_rows.numel() * pages.shape[1]
        if self._gathered.numel() < num_elements:
            # Release the old buffer first: both together would exceed the tile's limit.
            self._gathered = self._gathered.new_empty(0)
            self._gathered = torch.empty(num_elements, dtype=pages.dtype, device=pages.device)
        out = self._gathered[:num_elements].view(-1, pages.shape[1])
        return torch.index_select(pages, 0, page_rows.reshape(-1), out=out)

    def _score_buffers(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return buffers of `shape` for a tile's attention scores (float32) and for its attention
        weights (the dtype of the pages)."""
        num_elements = prod(shape)
        if self._scores.numel() < num_elements:
            self._scores = self._scores.new_empty(max(num_elements, self._scratch.num_scores))
            self._weights = self._weights.new_empty(self._scores.shape)
        return self._scores[:num_elements].view(shape), self._weights[:num_elements].view(shape)

    def _tiles(self, layer: int, num_rows: int, width: int) -> Iterator[tuple[slice, slice]]:
        """Yield (rows, key heads) of tiles whose pages, `width` blocks per row and head, have at
        most `TileLimits.gathered_bytes`; a tile has at least one row and one head.
        """
        shape = self._pages.shapes[layer]
        num_elements = 2 * width * self._pages.block_size * shape.head_dim
        max_row_heads = max(
            self._scratch.gathered_bytes // (num_elements * self._pages.dtype.itemsize), 1
        )
        num_heads = min(max_row_heads, shape.num_heads)
        for rows in _slices(num_rows, max(max_row_heads // shape.num_heads, 1)):
            for heads in _slices(shape.num_heads, num_heads):
                yield rows, heads

    def _attend_group(
        self, layer: int, group: RowGroup, query: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        """Attend for a group of single-token rows: query and out [rows, Hq, D]. The queries of one
        key head form one matrix.
        """
        shape = self._pages.shapes[layer]
        num_rows, num_queries, head_dim = query.shape
        per_head = (num_rows, shape.num_heads, num_queries // shape.num_heads)
        queries, attended = query.view(*per_head, head_dim), out.view(*per_head, head_dim)
        sinks = None if scoring.sinks is None else scoring.sinks.float().view(*per_head[1:], 1)
        for rows, heads in self._tiles(layer, num_rows, group.width):
            part = queries[rows, heads]
            gathered = self._gather(layer, group.page_rows[:, rows, heads])
            keys, values = gathered.view(2, part.shape[0] * part.shape[1], -1, head_dim)
            scores, centre = self._group_scores(part, keys, group.mask[rows], scoring)
            if scoring.is_plain:
                weights = torch.softmax(scores, -1, dtype=torch.float32)
            else:
                own_sinks = None if sinks is None else sinks[heads] - centre
                weights = scores.float()
                weights /= _exponentiate(weights, own_sinks)
            weights = weights.to(query.dtype).flatten(0, 1)
            attended[rows, heads] = torch.bmm(weights, values).view(part.shape)

    def _group_scores(
        self, queries: Tensor, keys: Tensor, mask: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Return masked scores of queries [rows, heads, queries, D] minus a centre, and the centre.

        A batched product in half precision sums in float32 but rounds its result (to 8 significant
        bits in bfloat16). This rounding is coarse for a large score. A softmax needs exact
        differences from the maximum, so a value near the maximum is subtracted before the rounding.
        It is computed from the first block's keys, where attention concentrates.
        """
        matrices, transposed = queries.flatten(0, 1), keys.transpose(1, 2)
        shape = (*queries.shape[:-1], keys.shape[1])
        centre = torch.zeros((), dtype=queries.dtype, device=queries.device)
        if queries.dtype != torch.float32:
            width = self._pages.block_size
            first = keys[:, :width].contiguous().transpose(1, 2)
            guess = torch.bmm(matrices * scoring.scaling, first).view(*shape[:-1], -1)
            # Only valid keys: the rest of a block may have any content. The first block of a row
            # always has a valid key.
            centre = (guess + mask[..., :width]).amax(-1, keepdim=True)
        offset = (-centre if scoring.softcap else mask - centre).expand(shape)
        scores = torch.baddbmm(offset.flatten(0, 1), matrices, transposed, alpha=scoring.scaling)
        scores = scores.view(shape)
        if not scoring.softcap:
            return scores, centre
        capped = _cap(scores.float().add_(centre), scoring.softcap).add_(mask)
        return capped, torch.zeros_like(centre)

    def _attend_chunk(
        self,
        layer: int,
        chunk: Chunk,
        past: ChunkKeys,
        query: Tensor,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """Attend for one chunk: query and out [n, Hq, D]."""
        num_tokens, num_queries, head_dim = query.shape
        num_heads, width = past.page_rows.shape[1:]
        group = num_queries // num_heads
        for _, heads in self._tiles(layer, 1, width):
            own = slice(heads.start * group, heads.stop * group)
            gathered = self._gather(layer, past.page_rows[:, heads])
            keys, values = gathered.view(2, heads.stop - heads.start, -1, head_dim)
            for rows in _slices(num_tokens, len(past.mask)):
                seen, mask = past.tile(chunk, rows, scoring.window)
                part = query[rows, own], keys[:, seen], values[:, seen], mask
                if scoring.is_plain:
                    out[rows, own] = _attend_plain(*part, scoring.scaling)
                else:
                    self._attend_tile(*part, scoring, own, out[rows, own])

    def _attend_tile(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scoring: Scoring,
        own: slice,
        out: Tensor,
    ) -> None:
        """Attend with query [n, Hq, D] to keys and values [H, keys, D], into `out`. `own`: the
        layer's query heads that `query` contains; their sinks are used.
        """
        num_heads, num_keys, _ = keys.shape
        num_tokens = len(query)
        queries, attended = query.unflatten(1, (num_heads, -1)), out.unflatten(1, (num_heads, -1))
        group = queries.shape[2]
        sinks = scoring.sinks
        if sinks is not None:
            sinks = sinks[own].float().view(num_heads, group, 1, 1)
        # Without a window every token attends to all keys before the tile.
        first_masked = 0 if scoring.window else num_keys - num_tokens
        for heads in _slices(
            num_heads, max(self._scratch.num_scores // (group * num_tokens * num_keys), 1)
        ):
            rows = queries[:, heads].permute(1, 2, 0, 3).float() * scoring.scaling
            scores, weights = self._score_buffers((*rows.shape[:3], num_keys))
            transposed = keys[heads].float().transpose(1, 2)
            torch.bmm(rows.flatten(1, 2), transposed, out=scores.flatten(1, 2))
            if scoring.softcap:
                _cap(scores, scoring.softcap)
            scores[..., first_masked:] += mask[:, first_masked:]
            sums = _exponentiate(scores, None if sinks is None else sinks[heads])
            weights = weights.copy_(scores).flatten(1, 2)
            part = torch.bmm(weights, values[heads]).view(rows.shape) / sums
            attended[:, heads] = part.permute(2, 0, 1, 3)


def _native_kernels(pages: KVPages, kernels: Kernels | None) -> Kernels | None:
    """Return the compiled kernels, or None if tensor operations are used: on a GPU, for other
    dtypes, for larger heads, or without compiled kernels.
    """
    if pages.device.type != "cpu" or pages.dtype not in DTYPES:
        return None
    if max(shape.head_dim for shape in pages.shapes) > MAX_HEAD_DIM:
        return None
    kernels = kernels or load()
    return kernels if kernels.is_native else None


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_same(one: Scoring, other: Scoring) -> bool:
    """Return whether two scorings are equal and have the same `sinks` tensor. The values of `sinks`
    are not compared, because they may change.
    """
    plain = (one.scaling, one.window, one.softcap) == (other.scaling, other.window, other.softcap)
    return plain and one.sinks is other.sinks


def _slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `count` indices."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _attend_plain(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend with PyTorch's scaled_dot_product_attention: query [n, Hq, D], keys and values
    [H, keys, D], `mask` [n, keys] or None for a causal one.
    """
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask if mask is None else mask[None, None],
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != len(keys),
    )
    return attended[0].transpose(0, 1)


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


def _exponentiate(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Replace float32 scores by exp(score - maximum) in place; return the sums, including the
    sinks' terms, [..., 1].
    """
    greatest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        greatest = torch.maximum(greatest, sinks)
    sums = scores.sub_(greatest).exp_().sum(-1, keepdim=True)
    return sums if sinks is None else sums.add_(torch.exp(sinks - greatest))
