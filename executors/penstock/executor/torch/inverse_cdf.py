"""Samples a token per row by inverse transform sampling, after top-k, top-p and min-p.

The truncations are thresholds on the logit that keep everything at or above them, including ties,
so the kept set depends only on the row's values and not on the order of a sort. They apply in this
order: top-k; top-p on the tokens that top-k kept, renormalised; min-p. The draw uses the cumulative
weights of the kept tokens in order of id. So a row's token is the same whether the threshold was
found among the row's most likely tokens (the usual case) or by a search over the whole row.
"""

import torch
from torch import Tensor

from penstock.executor.torch.threshold_search import search_threshold
from penstock.executor.torch.truncation import Truncation

_WIDTHS = (64, 256)
"""How many of the most likely tokens are checked before the whole row is searched."""


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row from its whole distribution; return token ids int64 [m].

    `scores` float32 [m, V]: logits minus their row's maximum, divided by the temperature.
    `uniforms` float64 [m]: random numbers in [0, 1).
    """
    return _pick(scores.exp(), uniforms)


def draw_truncated(scores: Tensor, uniforms: Tensor, truncation: Truncation) -> Tensor:
    """Like `draw`, but only from the tokens that the truncation keeps."""
    num_rows, vocab_size = scores.shape
    totals = scores.exp().sum(1, dtype=torch.float64)
    tokens = torch.zeros(num_rows, dtype=torch.long, device=scores.device)
    pending = torch.arange(num_rows, device=scores.device)
    for width in _WIDTHS:
        if width >= vocab_size or not len(pending):
            break
        some = scores if len(pending) == num_rows else scores[pending]
        values, ids = some.topk(width, dim=1)
        threshold = _threshold(values, totals[pending], truncation.take(pending), vocab_size)
        # A value outside the candidates is at most the lowest candidate.
        is_exact = values[:, -1] < threshold
        is_kept = values >= threshold[:, None]
        # Kept tokens in order of id, then all others.
        order = torch.where(is_kept, ids, vocab_size).argsort(dim=1)
        weights = torch.where(is_kept, values, float("-inf")).exp().gather(1, order)
        picked = ids.gather(1, order.gather(1, _pick(weights, uniforms[pending])[:, None]))[:, 0]
        tokens[pending[is_exact]] = picked[is_exact]
        pending = pending[~is_exact]
    if len(pending):
        some = scores[pending]
        threshold = search_threshold(some, truncation.take(pending))
        weights = some.exp().mul_(some >= threshold[:, None])
        tokens[pending] = _pick(weights, uniforms[pending])
    return tokens


def _threshold(values: Tensor, totals: Tensor, truncation: Truncation, vocab_size: int) -> Tensor:
    """Return each row's threshold [m], at or above which scores are kept, or minus infinity where
    the candidates `values` [m, k] do not suffice to determine it.

    `values` are in descending order; `totals` [m]: mass of the whole row, on the scale of
    `values.exp()`.
    """
    width = values.shape[1]
    outside = float("-inf")
    top_k, top_p = truncation.top_k, truncation.top_p
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    by_k = values.gather(1, (top_k.clamp(1, width) - 1)[:, None])[:, 0]
    by_k = torch.where(has_top_k, by_k, outside)
    masses = torch.where(values >= by_k[:, None], values, outside).exp().double()
    reached = masses.cumsum(1) >= (top_p * torch.where(has_top_k, masses.sum(1), totals))[:, None]
    has_top_p = top_p < 1.0
    by_p = values.gather(1, reached.int().argmax(1, keepdim=True))[:, 0]
    by_p = torch.where(has_top_p & reached.any(1), by_p, outside)
    by_min = truncation.min_p.log().to(values.dtype)
    threshold = torch.maximum(torch.maximum(by_k, by_p), by_min)
    # Ties with the k-th value may exist outside the candidates, or the candidates' mass may be too
    # small.
    is_open = (has_top_k & (values[:, -1] >= by_k)) | (has_top_p & ~reached.any(1))
    return torch.where(is_open, outside, threshold)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return each row's first index whose cumulative weight exceeds uniform * total, int64 [m]."""
    cumulated = weights.cumsum(1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # A uniform number just below 1 may round to the total, which no cumulative weight exceeds.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below_total)
    picked = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return picked.clamp_(max=weights.shape[1] - 1)
