"""Stores the running batch as a struct of arrays, indexed by slot.

Holds the memory that scheduler and executor share: one row per slot. The scheduler writes it; the
executor reads it during `launch`.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import MAX_STOP_IDS, NO_TIME, Request

NO_TOKEN = -1


class SlotArrays:
    """Preallocated arrays of S = `num_slots` rows.

    Sampling options are as in `SamplingParams`: `temperature`, `top_p`, `min_p`,
    `repetition_penalty`, `presence_penalty`, `frequency_penalty` float32 [S]; `top_k`,
    `num_logprobs`, `num_prompt_logprobs` int32 [S]; `seed` uint64 [S].

    Attributes:
        num_tokens: int32 [S]; tokens so far, prompt and output, without tokens in flight.
        num_in_flight: int32 [S]; tokens that launched steps will add.
        num_computed: int32 [S]; tokens whose keys and values will have been written when all
            launched steps are done.
        num_prompt: int32 [S]; tokens of the client's prompt.
        max_total: int32 [S]; the length that ends the request.
        min_total: int32 [S]; the length up to which stop ids are banned.
        num_blocks: int32 [S]; blocks in the table.
        block_table: int32 [S, ceil(max_seq_len / block_size)]; the slot's blocks, in order of
            position.
        token_ids: int32 [S, max_seq_len]; the token at each position.
        stop_ids: int32 [MAX_STOP_IDS, S], -1 where unused.
        deadline, time_limit: float64 [S], times on the engine's clock; `deadline` is the request's
            earliest open deadline.
        key: int64 [S]; the request's key, 0 for a free slot.
        tenant: int32 [S]; the index of the request's tenant.
        level: int64 [S]; the request's priority class, raised by its age if it was admitted by age.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "deadline",
        "frequency_penalty",
        "key",
        "level",
        "max_seq_len",
        "max_total",
        "min_p",
        "min_total",
        "num_blocks",
        "num_computed",
        "num_in_flight",
        "num_logprobs",
        "num_prompt",
        "num_prompt_logprobs",
        "num_slots",
        "num_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop_ids",
        "temperature",
        "tenant",
        "time_limit",
        "token_ids",
        "top_k",
        "top_p",
    )

    def __init__(self, *, num_slots: int, max_seq_len: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.block_size = block_size
        max_blocks = -(-max_seq_len // block_size)

        def ints() -> NDArray[np.int32]:
            return np.zeros(num_slots, dtype=np.int32)

        def floats() -> NDArray[np.float32]:
            return np.zeros(num_slots, dtype=np.float32)

        self.num_tokens = ints()
        self.num_in_flight = ints()
        self.num_computed = ints()
        self.num_prompt = ints()
        self.max_total = ints()
        self.min_total = ints()
        self.num_blocks = ints()
        self.block_table: NDArray[np.int32] = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.token_ids: NDArray[np.int32] = np.zeros((num_slots, max_seq_len), dtype=np.int32)
        self.stop_ids: NDArray[np.int32] = np.full(
            (MAX_STOP_IDS, num_slots), NO_TOKEN, dtype=np.int32
        )
        self.deadline: NDArray[np.float64] = np.full(num_slots, NO_TIME)
        self.time_limit: NDArray[np.float64] = np.full(num_slots, NO_TIME)
        self.key: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.tenant = ints()
        self.level: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.temperature = floats()
        self.top_p = floats()
        self.min_p = floats()
        self.repetition_penalty = floats()
        self.presence_penalty = floats()
        self.frequency_penalty = floats()
        self.top_k = ints()
        self.num_logprobs = ints()
        self.num_prompt_logprobs = ints()
        self.seed: NDArray[np.uint64] = np.zeros(num_slots, dtype=np.uint64)

    def fill(self, request: Request) -> None:
        """Write a request into the row of its slot, except `level`, and except its blocks and
        `num_computed` (the KV cache sets these).
        """
        slot, spec = request.slot, request.spec
        num_tokens = len(request.tokens)
        self.num_tokens[slot] = num_tokens
        self.num_in_flight[slot] = 0
        self.num_prompt[slot] = spec.num_original_prompt_tokens
        self.max_total[slot] = spec.max_total_tokens
        self.min_total[slot] = spec.num_original_prompt_tokens + spec.num_stop_banned_tokens
        self.token_ids[slot, :num_tokens] = request.tokens
        self.stop_ids[: len(spec.stop_ids), slot] = spec.stop_ids
        first = request.first_token_s == NO_TIME
        self.deadline[slot] = min(spec.deadline_s, spec.ttft_deadline_s if first else NO_TIME)
        self.time_limit[slot] = spec.time_limit_s
        self.key[slot] = spec.key
        self.tenant[slot] = request.tenant
        sampling = spec.sampling
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.num_logprobs[slot] = sampling.num_logprobs
        self.num_prompt_logprobs[slot] = sampling.num_prompt_logprobs
        self.seed[slot] = sampling.seed

    def clear(self, slot: int) -> None:
        """Reset the values of a row that operations on whole columns read, so that these need no
        mask for free slots; other values stay.
        """
        self.num_tokens[slot] = 0
        self.num_in_flight[slot] = 0
        self.num_computed[slot] = 0
        self.max_total[slot] = 0
        self.num_blocks[slot] = 0
        self.stop_ids[:, slot] = NO_TOKEN
        self.deadline[slot] = NO_TIME
        self.time_limit[slot] = NO_TIME
        self.key[slot] = 0
