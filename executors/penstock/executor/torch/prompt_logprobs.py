"""Finds the packed tokens of a step whose logits predict prompt tokens, and computes the log
probabilities of these prompt tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.step_inputs import Ints
from penstock.executor.torch.token_logprobs import token_logprobs
from penstock.scheduler.batch import Batch, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptRows:
    """The packed tokens of one slot whose logits predict prompt tokens.

    `packed` int64 [t]: their indices among the packed tokens of the step. `tokens` int32 [t]: the
    predicted ids, of the prompt's positions from `first_position` on. `num_top`: number of top log
    probabilities.
    """

    slot: int
    first_position: int
    packed: Ints
    tokens: NDArray[np.int32]
    num_top: int


def prompt_rows(batch: Batch, last_of_row: Ints) -> list[PromptRows]:
    """Return, for each request with prompt logprobs, the packed tokens of this step whose logits
    predict prompt tokens; nothing predicts position 0. `last_of_row`: see `ForwardResult`.
    """
    arrays = batch.arrays
    found: list[PromptRows] = []
    for row in np.flatnonzero(arrays.num_prompt_logprobs[batch.slots] >= 0):
        slot, start = int(batch.slots[row]), int(batch.starts[row])
        num_tokens = int(batch.num_tokens[row])
        end = min(start + num_tokens, int(arrays.num_prompt[slot]) - 1)
        if end <= start:
            continue
        first = int(last_of_row[row]) - num_tokens + 1
        found.append(
            PromptRows(
                slot=slot,
                first_position=start + 1,
                packed=np.arange(first, first + end - start),
                tokens=arrays.token_ids[slot, start + 1 : end + 1].copy(),
                num_top=int(arrays.num_prompt_logprobs[slot]),
            )
        )
    return found


def prompt_logprobs(
    logits: Tensor, prompts: list[PromptRows]
) -> list[tuple[int, int, TokenLogprobs]]:
    """Return (slot, first position, log probabilities) for each of `prompts`; `logits` [tokens,
    vocabulary]: the logits of the packed tokens of all `prompts`, in order.
    """
    found: list[tuple[int, int, TokenLogprobs]] = []
    first = 0
    for prompt in prompts:
        rows = logits[first : first + len(prompt.packed)]
        first += len(prompt.packed)
        # An invalid token id fails the request, not the step.
        ids = torch.from_numpy(prompt.tokens.astype(np.int64).clip(0, logits.shape[1] - 1))
        logprobs = token_logprobs(rows, ids.to(logits.device), prompt.num_top)
        found.append((prompt.slot, prompt.first_position, logprobs))
    return found
