"""The next token of every sampled slot, from the logits of one step.

Owns the order of things and who takes which path: a row that only wants its greatest logit costs
one pass shared with all others; edits, log probabilities and draws are done for the rows that ask.
Does not know how logits came to be.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.counter_random import uniforms
from penstock.executor.torch.inverse_cdf import draw, draw_truncated
from penstock.executor.torch.logit_edits import LogitEdits
from penstock.executor.torch.slot_rules import SlotRules
from penstock.executor.torch.token_logprobs import scatter_rows, token_logprobs
from penstock.executor.torch.truncation import Truncation
from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.slot_arrays import SlotArrays

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """`tokens` int32 [m]; `is_good` bool [m], False where the logits were of no use; `logprobs`
    aligned with `tokens`, None when nobody asked."""

    tokens: NDArray[np.int32]
    is_good: NDArray[np.bool_]
    logprobs: TokenLogprobs | None


def sample(
    logits: Tensor, arrays: SlotArrays, slots: Ints, positions: Ints, rules: SlotRules
) -> Sampled:
    """Choose the token at `positions` [m] of each of `slots` [m] from its row of `logits` [m, V].

    Positions come with the batch: `arrays.num_tokens` may lag behind the step.
    """
    best, tokens = logits.max(-1)
    is_good = torch.isfinite(best)
    lengths = np.zeros(arrays.num_slots, dtype=np.int64)
    lengths[slots] = positions
    edits = LogitEdits(arrays=arrays, rules=rules, lengths=lengths)
    is_drawn = arrays.temperature[slots] > 0.0
    wants_logprobs = arrays.num_logprobs[slots] >= 0
    special = np.flatnonzero(is_drawn | wants_logprobs | edits.needed(slots))
    logprobs: TokenLogprobs | None = None
    if len(special):
        rows = torch.from_numpy(special).to(logits.device)
        some = logits.float() if len(special) == len(slots) else logits[rows].float()
        if some is logits:
            some = logits.clone()
        edits.apply(some, slots[special])
        some_best, some_tokens = some.max(-1)
        drawn = np.flatnonzero(is_drawn[special])
        if len(drawn):
            at = torch.from_numpy(drawn).to(logits.device)
            some_tokens[at] = _draw(some, some_best, at, arrays, slots[special[drawn]], lengths)
        # As edited, in float32: in half precision a large logit would be no number any more.
        is_good[rows] = torch.isfinite(some_best)
        tokens[rows] = some_tokens
        asking = np.flatnonzero(wants_logprobs[special])
        if len(asking):
            at = torch.from_numpy(asking).to(logits.device)
            num_top = int(arrays.num_logprobs[slots].max())
            part = token_logprobs(some[at], some_tokens[at], num_top)
            logprobs = scatter_rows(part, special[asking], len(slots))
    return Sampled(
        tokens=tokens.int().cpu().numpy(),
        is_good=is_good.cpu().numpy(),
        logprobs=logprobs,
    )


def _draw(
    logits: Tensor, best: Tensor, at: Tensor, arrays: SlotArrays, slots: Ints, lengths: Ints
) -> Tensor:
    """Tokens for the rows `at` of `logits`, which are those of `slots`."""
    device = logits.device

    def column(values: NDArray[np.float32] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values[slots]).to(device)

    if len(at) < len(logits):
        logits, best = logits[at], best[at]
    # Less the maximum first: no temperature, however small, overflows.
    scores = (logits - best[:, None]).div_(column(arrays.temperature)[:, None])
    numbers = torch.from_numpy(uniforms(arrays.seed[slots], lengths[slots])).to(device)
    top_k, top_p, min_p = arrays.top_k[slots], arrays.top_p[slots], arrays.min_p[slots]
    vocab_size = logits.shape[1]
    is_cut = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
    cut = np.flatnonzero(is_cut)
    if not len(cut):
        return draw(scores, numbers)
    truncation = Truncation(
        top_k=column(arrays.top_k).long(),
        top_p=column(arrays.top_p).double(),
        min_p=column(arrays.min_p).double(),
    )
    if len(cut) == len(slots):
        return draw_truncated(scores, numbers, truncation)
    tokens = torch.empty(len(slots), dtype=torch.long, device=device)
    some = torch.from_numpy(cut).to(device)
    rest = torch.from_numpy(np.flatnonzero(~is_cut)).to(device)
    tokens[some] = draw_truncated(scores[some], numbers[some], truncation.take(some))
    tokens[rest] = draw(scores[rest], numbers[rest])
    return tokens
