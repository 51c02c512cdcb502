"""Computes logits of a short sequence with the model's modules, to measure the effect of rounding.

Contains float32 attention over a sequence without pages. Also defines the trial sequence, fixed
tokens for which a fused step is compared with the modules at load.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.executor.torch.attention_interface import attach_runner
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import NotFused
from penstock.executor.torch.paged_attention import Scoring
from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays

NUM_TRIAL_TOKENS = 24
NUM_CHUNK_TOKENS = 18
"""Numbers of tokens of the trial sequence and of its first chunk: more than a block of the usual
size, and not a multiple of it.
"""


class WholeSequence:
    """An `AttentionRunner` that treats the packed tokens as one sequence and attends within it, in
    float32, without pages. Ignores soft caps and sinks.
    """

    def run_layer(
        self,
        layer: int,  # noqa: ARG002 - every layer alike
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Compute one layer's attention: query [T, Hq, D], key and value [T, H, D]; return
        [T, Hq, D].
        """
        num_tokens, num_heads, _ = query.shape
        group = num_heads // key.shape[1]
        keys = key.float().repeat_interleave(group, 1)
        values = value.float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scoring.scaling
        at = torch.arange(num_tokens, device=query.device)
        is_seen = at[None, :] <= at[:, None]
        if scoring.window:
            is_seen &= at[None, :] > at[:, None] - scoring.window
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def trial_tokens(embedding: Tensor, num_tokens: int) -> Tensor:
    """Return fixed token ids with finite embeddings, spread over the vocabulary. Raises NotFused if
    too few embeddings are finite.
    """
    vocab_size = len(embedding)
    spread = (torch.arange(4 * num_tokens) * 7919 + 13) % vocab_size
    is_finite = torch.isfinite(embedding[spread.to(embedding.device)]).all(1).cpu()
    tokens = spread[is_finite][:num_tokens]
    if len(tokens) < num_tokens:
        raise NotFused("most of its embeddings are not finite")
    return tokens


def trial_arrays(embedding: Tensor, num_tokens: int, block_size: int) -> SlotArrays:
    """Return `trial_tokens` as the sequence of one slot, in the blocks from 0 on."""
    arrays = SlotArrays(num_slots=1, max_seq_len=num_tokens, block_size=block_size)
    arrays.token_ids[0] = trial_tokens(embedding, num_tokens).numpy()
    arrays.num_tokens[0] = num_tokens
    arrays.block_table[0] = np.arange(arrays.block_table.shape[1])
    return arrays


def trial_batch(arrays: SlotArrays, start: int, count: int) -> Batch:
    """Return a step of `count` tokens of the trial sequence, from position `start` on."""
    slots = np.zeros(1, dtype=np.int32)
    return Batch(
        step=0,
        arrays=arrays,
        slots=slots,
        num_tokens=np.array([count], dtype=np.int32),
        starts=np.array([start], dtype=np.int32),
        num_decodes=int(count == 1),
        sampled_slots=slots,
    )


def module_logits(model: LoadedModel, ids: Tensor) -> Tensor:
    """Return float32 logits [len(ids), vocabulary] of one sequence; leaves a `WholeSequence`
    attached to the model.
    """
    attach_runner(model.module, WholeSequence())
    ids = ids.to(model.device)
    positions = torch.arange(len(ids), device=model.device)
    return model.logits(ids[None], positions[None], positions).float()
