"""Creates the steps that need the most memory, so that a step's memory can be measured at load.

All keys and values of these steps are in block 0: every entry of the block tables is 0.
"""

from dataclasses import dataclass

import numpy as np

from penstock.executor.torch.step_inputs import Ints
from penstock.scheduler.batch import Batch
from penstock.scheduler.slot_arrays import SlotArrays

_NUM_TOP = 20
"""Number of top log probabilities per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits that determine the widest step (see `widest_step`).

    Attributes:
        max_tokens: Maximum number of tokens in the step.
        max_rows: Maximum number of rows of the step.
        max_seq_len: Maximum length of a sequence, in tokens.
        num_keys: Maximum number of keys that all decodes attend to together.
        num_mask_elements: Number of mask elements of an attention tile (`TileLimits`).
    """

    max_tokens: int
    max_rows: int
    max_seq_len: int
    num_keys: int
    num_mask_elements: int


def last_tokens(lengths: Ints, counts: Ints, *, max_seq_len: int, block_size: int) -> Batch:
    """Return a step of the last `counts` [n] tokens of n sequences of `lengths` [n] tokens; every
    row samples. Token ids and sampling options are 0.
    """
    arrays = SlotArrays(num_slots=len(lengths), max_seq_len=max_seq_len, block_size=block_size)
    arrays.num_tokens[:] = lengths
    slots = np.arange(len(lengths), dtype=np.int32)
    return Batch(
        step=0,
        arrays=arrays,
        slots=slots,
        num_tokens=counts.astype(np.int32),
        starts=(lengths - counts).astype(np.int32),
        num_decodes=0,
        sampled_slots=slots,
    )


def widest_step(limits: StepLimits, *, vocab_size: int, block_size: int) -> Batch:
    """Return the step of these limits that needs the most memory with tensor operations.

    Decodes of long sequences need the most memory for gathered pages and for the sampler; the
    remaining tokens are the last tokens of the longest prompts, because these need masks and logits
    of all their tokens. Every chunk has its own mask, so these tokens form as many chunks as can
    have full-size masks.
    """
    longest = limits.max_seq_len
    num_masks = -(-limits.max_tokens * longest // limits.num_mask_elements)
    # A chunk that starts at position 0 needs no mask.
    num_needed = -(-limits.max_tokens // (longest - 1))
    num_chunks = min(max(num_masks, num_needed), limits.max_rows)
    num_decodes = limits.max_rows - num_chunks
    chunk = max(-(-(limits.max_tokens - num_decodes) // num_chunks), 1)
    context = max(limits.num_keys // max(num_decodes, 1), 1)
    per_row = np.array([num_decodes, num_chunks])
    batch = last_tokens(
        np.repeat([min(context, longest), longest], per_row),
        np.repeat([1, min(chunk, longest - 1)], per_row),
        max_seq_len=longest,
        block_size=block_size,
    )
    batch.arrays.num_prompt[num_decodes:] = longest
    # Different ids, because a GPU adds penalties of the same id one after the other.
    batch.arrays.token_ids[:] = np.arange(longest) % vocab_size
    set_widest_options(batch.arrays, vocab_size)
    return batch


def set_widest_options(arrays: SlotArrays, vocab_size: int) -> None:
    """Set the sampling options that need the most memory.

    The options of the first three slots differ, because the sampler copies some rows of the logits
    only if not all rows have the same options: the first slot has no penalties and no log
    probabilities, the first two are greedy, and the first three have no truncation.
    """
    plain, greedy, uncut = (min(count, arrays.num_slots - 1) for count in (1, 2, 3))
    arrays.repetition_penalty[:] = 1.0
    arrays.repetition_penalty[plain:] = 1.1
    arrays.presence_penalty[plain:] = 0.1
    arrays.frequency_penalty[plain:] = 0.1
    arrays.num_logprobs[:plain] = -1
    arrays.num_logprobs[plain:] = _NUM_TOP
    arrays.num_prompt_logprobs[:] = _NUM_TOP
    arrays.temperature[greedy:] = 1.0
    arrays.top_p[:] = 1.0
    arrays.top_p[uncut:] = 0.9
    # So many that the whole rows are searched.
    arrays.top_k[uncut:] = vocab_size - 1
