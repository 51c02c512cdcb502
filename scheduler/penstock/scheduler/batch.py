"""The scheduler's interface to the executor: `Batch` (input) and `StepResult` (output).

Defines the shapes of their arrays. The scheduler chooses a batch; the executor computes it.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import FinishReason, Request
from penstock.scheduler.slot_arrays import SlotArrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step: which slots run and how many tokens each.

    `slots`, `num_tokens`, `starts` int32 [num_rows]: `num_decodes` rows of one token each, then
    prefill chunks. For row i the tokens at positions `starts[i] .. starts[i] + num_tokens[i] - 1`
    of slot `slots[i]` are computed and their keys and values written to the slot's blocks; position
    p is in block `arrays.block_table[slot, p // block_size]` at offset `p % block_size`.

    The input token at position p is `arrays.token_ids[slot, p]` when `p < arrays.num_tokens[slot]`
    at launch; otherwise it is the token that the executor sampled for that slot in the previous
    step (pipeline depth 2: its value has not been collected yet).

    `sampled_slots` int32 [m]: the slots that sample a token, in row order: the slots of all decode
    rows, and of the prefill rows that compute the last of their request's current tokens.

    The arrays change after `launch` returns: an executor must read or copy what it needs before
    that. A batch without rows only releases slots; its result is empty.

    Attributes:
        admitted: Requests that got a slot since the last batch (`request.slot`). An executor must
            process `released` first, because a released slot may be assigned again.
        released: Slots released since the last batch, including slots that were assigned again.
        num_used_blocks: Blocks of running requests, shared ones counted once.
        num_old_blocks: `num_used_blocks` before this step allocated blocks.
        num_paused: Number of running decodes that are not in this step.

    For a self-paced executor (see `ExecutorInfo`) a prompt is one chunk, repeated in every batch
    until its first token has arrived.
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
        """Number of rows: one for each slot that runs in this step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Natural logarithms of the probabilities of t tokens, before temperature and truncation, after
    penalties.

    `chosen` float32 [t]; `ranks` int32 [t] (1 = most likely); `top_ids` int32 [t, k] (-1 if there
    are fewer) and `top_logprobs` float32 [t, k], most likely first; k is the largest number that a
    request of the step asks for (may be 0). Rows of requests without logprobs are undefined.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def take(self, rows: NDArray[np.intp] | slice) -> "TokenLogprobs":
        """Return the logprobs of the tokens in these rows."""
        return TokenLogprobs(
            chosen=self.chosen[rows],
            ranks=self.ranks[rows],
            top_ids=self.top_ids[rows],
            top_logprobs=self.top_logprobs[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFailure:
    """A request that failed; the rest of the batch is valid.

    `detail` is for the server log only and must not contain client data. `is_rejected`: the
    executor does not support an option of the request (a client error). `is_constraint_error`: the
    unsupported option is the constraint."""

    slot: int
    detail: str
    is_rejected: bool = False
    is_constraint_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEnd:
    """A request that the executor ended by itself, after the tokens of this result.

    Used only where the scheduler cannot detect the end from the tokens. `stop_id`: the stop token
    that ended it, -1 for none.
    """

    slot: int
    reason: FinishReason
    stop_id: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The result of one launched batch.

    Attributes:
        slots: int32 [m], usually the object `batch.sampled_slots`.
        tokens: int32 [m], one per slot, when `counts` is None; otherwise int32 [sum of counts]:
            `counts[i]` tokens for `slots[i]`, concatenated.
        counts: int32 [m], number of tokens of each slot; None if each slot has one token. 0 is
            allowed: the slot is scheduled again. If a count is above one, the keys and values of
            all but the last token are in the slot's blocks. Counts require a pipeline depth of 1.
        logprobs: Aligned with `tokens`; None when none were requested.
        prompt_logprobs: (slot, first position, logprobs): the logprobs that this step's chunk
            predicted for the prompt tokens at positions first, first + 1, ...
        failures: Slots that failed; they have no tokens.
        ends: Requests that the executor ended by itself, after their tokens.
        num_cached: (slot, number of prompt tokens found in the executor's own cache), if the
            executor manages its cache.

    With a self-paced executor (see `ExecutorInfo`), tokens may extend past the slot's blocks, and
    `counts` is always set.
    """

    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    counts: NDArray[np.int32] | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, int, TokenLogprobs], ...] = ()
    failures: tuple[SlotFailure, ...] = field(default=())
    ends: tuple[SlotEnd, ...] = ()
    num_cached: tuple[tuple[int, int], ...] = ()
