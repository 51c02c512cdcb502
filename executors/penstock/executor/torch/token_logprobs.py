"""Computes log probabilities, ranks and the most likely tokens from rows of logits."""

import numpy as np
import torch
from torch import Tensor

from penstock.scheduler.batch import TokenLogprobs

ROWS_AT_ONCE = 128
"""Number of rows processed at once, which limits the float32 copy of a long prompt's logits."""


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> TokenLogprobs:
    """Return, on the host, log probabilities and ranks of `tokens` int64 [t], and the `num_top`
    most likely tokens, from `logits` [t, V] of any float type.
    """
    parts = [
        logprobs_of(
            logits[first : first + ROWS_AT_ONCE], tokens[first : first + ROWS_AT_ONCE], num_top
        )
        for first in range(0, len(tokens), ROWS_AT_ONCE)
    ]
    columns = zip(*parts, strict=True)
    chosen, ranks, top_ids, top_logprobs = (torch.cat(column) for column in columns)
    return TokenLogprobs(
        chosen=chosen.cpu().numpy(),
        ranks=ranks.int().cpu().numpy(),
        top_ids=top_ids.int().cpu().numpy(),
        top_logprobs=top_logprobs.cpu().numpy(),
    )


def scatter_rows(part: TokenLogprobs, rows: np.ndarray, num_rows: int) -> TokenLogprobs:
    """Return `num_rows` rows with `part` at `rows`, zeros elsewhere."""

    def spread(values: np.ndarray) -> np.ndarray:
        out = np.zeros((num_rows, *values.shape[1:]), dtype=values.dtype)
        out[rows] = values
        return out

    return TokenLogprobs(
        chosen=spread(part.chosen),
        ranks=spread(part.ranks),
        top_ids=spread(part.top_ids),
        top_logprobs=spread(part.top_logprobs),
    )


def logprobs_of(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, on the device, the log probabilities [t] and ranks [t] (from 1) of `tokens` [t], and
    the ids and log probabilities [t, num_top] of the most likely tokens, from `logits` [t, V].
    """
    logprobs = torch.log_softmax(logits.float(), dim=1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    top_logprobs, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
    return chosen[:, 0], ranks, top_ids, top_logprobs
