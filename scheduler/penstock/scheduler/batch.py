"""The values that scheduler and executor exchange: a `Batch` in, a `StepResult` out.

Owns the two values and the meaning of their arrays. Does not know how a batch was chosen or how it
is computed.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import FinishReason, Request
from penstock.scheduler.slot_arrays import SlotArrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step: which slots run and how many tokens each.

    Rows are in two groups: `num_decodes` rows of one token each, then prefill chunks. For row i the
    tokens at positions `starts[i] .. starts[i] + num_tokens[i] - 1` of slot `slots[i]` are computed
    and their keys and values written to the slot's blocks; position p is in block
    `arrays.block_table[slot, p // block_size]` at offset `p % block_size`.

    The input token at position p is `arrays.token_ids[slot, p]` when `p < arrays.num_tokens[slot]`
    at launch; otherwise it is the token the executor itself sampled for that slot in the step
    before (pipeline depth 2: its value has not been collected yet).

    `sampled_slots` [m]: slots, in row order, whose row ends with the last known token, so that its
    logits give the next one: all decode rows, and prefill rows that complete.

    The arrays change after `launch` returns: an executor must read or copy what it needs before
    that. `admitted`: requests that got a slot since the last batch (`request.slot`); `released`:
    slots released since the last batch, including those assigned again (handle `released` first,
    then `admitted`). A batch without rows has releases only; its result is empty.
    `num_used_blocks`: blocks of running requests, shared ones counted once; `num_old_blocks`: the
    same count before this step allocated any. `num_paused`: decodes that are left out of this step.

    For a self-paced executor a prompt is one chunk, repeated in every batch until its first token
    has arrived.
    """

    step: int
    arrays: SlotArrays
    slots: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    starts: NDArray[np.int32]
    num_decodes: int
    sampled_slots: NDArray[np.int32]
    admitted: tuple[Request, ...] = ()
    released: tuple[int, ...] = ()
    num_used_blocks: int = 0
    num_old_blocks: int = 0
    num_paused: int = 0

    @property
    def num_rows(self) -> int:
        """Number of slots that run in this step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Natural-log probabilities of t tokens, before temperature and truncation, after penalties.

    `chosen` float32 [t]; `ranks` int32 [t] (1 = most likely); `top_ids` int32 [t, k] (-1 where
    there are fewer) and `top_logprobs` float32 [t, k], most likely first, k the largest number any
    request of the step asked for (0 is allowed). Rows of requests without logprobs are undefined.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def take(self, rows: NDArray[np.intp] | slice) -> "TokenLogprobs":
        """Return the logprobs of some of the tokens."""
        return TokenLogprobs(
            chosen=self.chosen[rows],
            ranks=self.ranks[rows],
            top_ids=self.top_ids[rows],
            top_logprobs=self.top_logprobs[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFailure:
    """A request that failed alone; the rest of the batch is valid.

    `detail` is for the server log only and contains nothing that a client sent. `is_refusal`: the
    executor does not support what the request asks for, so it is a client error;
    `is_of_constraint`: the unsupported part is the constraint.
    """

    slot: int
    detail: str
    is_refusal: bool = False
    is_of_constraint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEnd:
    """A request that the executor ended itself, after the tokens of this result.

    Only for ends that the scheduler cannot detect from the tokens. `stop_id`: -1 if no stop token
    ended it.
    """

    slot: int
    reason: FinishReason
    stop_id: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The outcome of one launched batch.

    `slots` int32 [m]: usually `batch.sampled_slots` itself. `tokens` int32: one per slot when
    `counts` is None; otherwise `counts[i]` tokens for `slots[i]`, concatenated (0 is allowed: that
    slot is computed again). A count above one means that the keys and values of all but the last
    are written too, within the slot's blocks. Counts need a pipeline depth of 1. `logprobs` is
    aligned with `tokens`, None when none were requested. `prompt_logprobs`: (slot, first position,
    logprobs): rows for the prompt tokens at positions first, first + 1, ... that this step's chunk
    predicted. Slots in `failures` have no tokens. `ends`: see SlotEnd. `num_cached`: (slot, tokens
    of its prompt that were found in the executor's own cache), where the executor manages its
    cache.

    With a self-paced executor, tokens may extend past the slot's blocks, and `counts` is always
    set.
    """

    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, int, TokenLogprobs], ...] = ()
    failures: tuple[SlotFailure, ...] = field(default=())
    ends: tuple[SlotEnd, ...] = ()
    num_cached: tuple[tuple[int, int], ...] = ()
