"""Finds the exact threshold of a truncation (top-k, top-p, min-p) without a sort.

Used for distributions that are too flat for a partial sort. Bisects over the bits of a float32.
Both the number of logits at or above t and their mass decrease monotonically with t, so 31 passes
over a row find the greatest t that keeps enough for top-k or top-p. This t is one of the row's
values, because the sums change only at these. The cost is the same for every row; a full sort of a
large vocabulary would delay the whole batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.executor.torch.truncation import Truncation

_NUM_PASSES = 31
_MAGNITUDE_BITS = 0x7FFF_FFFF


def search_threshold(scores: Tensor, truncation: Truncation) -> Tensor:
    """Return each row's threshold, float32 [m]: scores at or above it are kept. `scores` float32
    [m, V] are at most zero.
    """
    outside = float("-inf")
    is_at_least = torch.empty_like(scores)

    def at_least(threshold: Tensor) -> Tensor:
        # 1 and 0 in float32 as factors, because selecting with a boolean mask is several times
        # slower here.
        return torch.ge(scores, threshold, out=is_at_least)

    by_k = torch.full(scores.shape[:1], outside, device=scores.device)
    has_top_k = (truncation.top_k > 0) & (truncation.top_k < scores.shape[1])
    if bool(has_top_k.any()):
        found = _greatest_threshold(lambda t: at_least(t).sum(1) >= truncation.top_k, scores)
        by_k = torch.where(has_top_k, found, outside)
    weights = scores.exp().mul_(at_least(by_k[:, None]))
    enough = truncation.top_p * weights.sum(1, dtype=torch.float64)

    def holds_enough(threshold: Tensor) -> Tensor:
        return at_least(threshold).mul_(weights).sum(1, dtype=torch.float64) >= enough

    by_p = torch.where(truncation.top_p < 1.0, _greatest_threshold(holds_enough, scores), outside)
    by_min = truncation.min_p.log().to(scores.dtype)
    return torch.maximum(torch.maximum(by_k, by_p), by_min)


def _greatest_threshold(is_enough: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Return each row's greatest t [m] for which `is_enough(t [m, 1])` holds, or minus infinity."""
    device = scores.device
    low = _ordered(torch.full(scores.shape[:1], float("-inf"), device=device))
    high = torch.ones_like(low)  # the first number above zero: no score is greater
    for _ in range(_NUM_PASSES):
        middle = low + (high - low) // 2
        holds = is_enough(_number(middle)[:, None])
        low = torch.where(holds, middle, low)
        high = torch.where(holds, high, middle)
    return _number(low)


def _ordered(numbers: Tensor) -> Tensor:
    """Return int32 in the same order as the floats: their bits, with the magnitude inverted for
    negative numbers.
    """
    bits = numbers.view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ _MAGNITUDE_BITS)


def _number(ordered: Tensor) -> Tensor:
    """Return the float32 numbers that `_ordered` maps to these integers."""
    return torch.where(ordered >= 0, ordered, ordered ^ _MAGNITUDE_BITS).view(torch.float32)
