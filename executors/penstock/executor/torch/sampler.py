"""Samples the next token of every slot from the logits of one step.

Rows with logit edits or log probabilities, and random draws in PyTorch, use a float32 copy of their
logits. On a CPU, compiled kernels, if available, choose the tokens of the other rows and draw all
random tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.counter_random import uniforms
from penstock.executor.torch.cpu_kernels.native_sampling import (
    SAMPLING_OPTIONS,
    can_sample,
    choose_greatest,
    draw_rows,
)
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
    """The sampled tokens. `tokens` int32 [m]; `is_good` bool [m]: False if the row's logits are not
    finite; `logprobs`: aligned with `tokens`, None if no row requests them.
    """

    tokens: NDArray[np.int32]
    is_good: NDArray[np.bool_]
    logprobs: TokenLogprobs | None


def sample(
    logits: Tensor, arrays: SlotArrays, slots: Ints, positions: Ints, rules: SlotRules
) -> Sampled:
    """Sample the token at `positions` [m] for `slots` [m] from the rows of `logits` [m, V].

    `positions` come from the batch, because `arrays.num_tokens` may lag behind the step.
    """
    lengths = np.zeros(arrays.num_slots, dtype=np.int64)
    lengths[slots] = positions
    edits = LogitEdits(arrays=arrays, rules=rules, lengths=lengths)
    is_drawn = arrays.temperature[slots] > 0.0
    wants_logprobs = arrays.num_logprobs[slots] >= 0
    is_copied = wants_logprobs | edits.needed(slots)
    is_native = can_sample(logits)
    if not is_native:
        is_copied |= is_drawn
    sampled = _sample_unedited(
        logits, arrays, slots, lengths, is_drawn=is_drawn, is_copied=is_copied
    )
    special = np.flatnonzero(is_copied)
    if not len(special):
        return sampled
    rows = torch.from_numpy(special).to(logits.device)
    some = logits.float() if len(special) == len(slots) else logits[rows].float()
    if some is logits:
        some = logits.clone()
    edits.apply(some, slots[special])
    best, greatest = some.max(-1)
    # Checked after the edits, in float32: in half precision a large logit would overflow.
    sampled.is_good[special] = torch.isfinite(best).cpu().numpy()
    drawn = np.flatnonzero(is_drawn[special])
    if len(drawn):
        at = torch.from_numpy(drawn).to(logits.device)
        own = slots[special[drawn]]
        if is_native:
            drawn_tokens = draw_rows(some, drawn, _sampling_options(arrays, own, lengths)).tokens
            greatest[at] = torch.from_numpy(drawn_tokens).long()
        else:
            greatest[at] = _draw(some, best, at, arrays, own, lengths)
    sampled.tokens[special] = greatest.cpu().numpy()
    asking = np.flatnonzero(wants_logprobs[special])
    if not len(asking):
        return sampled
    at = torch.from_numpy(asking).to(logits.device)
    num_top = int(arrays.num_logprobs[slots].max())
    part = token_logprobs(some[at], greatest[at], num_top)
    return replace(sampled, logprobs=scatter_rows(part, special[asking], len(slots)))


def _sample_unedited(
    logits: Tensor,
    arrays: SlotArrays,
    slots: Ints,
    lengths: Ints,
    *,
    is_drawn: NDArray[np.bool_],
    is_copied: NDArray[np.bool_],
) -> Sampled:
    """Sample rows whose logits need no copy; the result is undefined for the other rows."""
    drawn = np.flatnonzero(is_drawn & ~is_copied)
    if not can_sample(logits):
        best, tokens = logits.max(-1)
        return Sampled(
            tokens=tokens.int().cpu().numpy(),
            is_good=torch.isfinite(best).cpu().numpy(),
            logprobs=None,
        )
    if len(drawn) == len(slots):
        chosen = draw_rows(logits, drawn, _sampling_options(arrays, slots, lengths))
        return Sampled(tokens=chosen.tokens, is_good=chosen.is_good, logprobs=None)
    chosen = choose_greatest(logits)
    if len(drawn):
        some = draw_rows(logits, drawn, _sampling_options(arrays, slots[drawn], lengths))
        chosen.tokens[drawn], chosen.is_good[drawn] = some.tokens, some.is_good
    return Sampled(tokens=chosen.tokens, is_good=chosen.is_good, logprobs=None)


def _sampling_options(arrays: SlotArrays, slots: Ints, lengths: Ints) -> NDArray[np.void]:
    options = np.empty(len(slots), dtype=SAMPLING_OPTIONS)
    options["temperature"] = arrays.temperature[slots]
    options["top_p"] = arrays.top_p[slots]
    options["min_p"] = arrays.min_p[slots]
    options["top_k"] = arrays.top_k[slots]
    options["uniform"] = uniforms(arrays.seed[slots], lengths[slots])
    return options


def _draw(
    logits: Tensor, best: Tensor, at: Tensor, arrays: SlotArrays, slots: Ints, lengths: Ints
) -> Tensor:
    """Return tokens sampled for the rows `at` of `logits`; these rows belong to `slots`."""
    device = logits.device

    def column(values: NDArray[np.float32] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values[slots]).to(device)

    if len(at) < len(logits):
        logits, best = logits[at], best[at]
    # Subtract the maximum first, so that even a very small temperature does not overflow.
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
