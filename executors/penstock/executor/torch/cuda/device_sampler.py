"""Samples the next token of each row on the device, with few launches per step.

Keeps on the device the slots' sampling options, the token counts for penalties, and the results of
a step. Options are copied to the device when a request is admitted; a step copies nothing, so it
can be captured in a CUDA graph.

A token depends only on its row's logits and mask, its position, and its request's options (with the
seed) and earlier tokens. Random numbers are bit-identical to the random numbers of
`counter_random`. The order of summation and the rounding of exp differ from the CPU sampler: both
samplers choose the same token unless its random number or a truncation threshold is within the
rounding error (about 1e-6 of the mass) of a boundary.
"""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cuda.kernels import sampler_choice, sampler_scores
from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.batch import Batch, TokenLogprobs
from penstock.scheduler.request import Request

# A launch accepts options, such as num_warps, that are not parameters of the kernel.
choice: Any = sampler_choice
kernels: Any = sampler_scores

MAX_TOP: int = kernels.MAX_TOP.value
MAX_BIASES: int = kernels.MAX_BIASES.value
_CHUNK: int = kernels.CHUNK.value
_PARTS: int = _CHUNK // kernels.PART.value
_LEAST_TEMPERATURE = 1e-30
_WARPS = 4
_SEARCH_WARPS = 16

Ints = NDArray[np.int64]


class Variant(enum.Enum):
    """Which kernels a sampling step launches; only PLAIN is captured in CUDA graphs."""

    PLAIN = "plain"
    """All rows are greedy or have only a temperature."""
    FULL = "full"
    """Rows may have any option."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePlan:
    """How the rows of a step are sampled, and which log probabilities they request, at its launch.

    `wants_logprobs` bool [m]; `num_top`: the greatest number of top log probabilities that a row
    requests.
    """

    variant: Variant
    wants_logprobs: NDArray[np.bool_]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceSamples:
    """The results on the device, valid until the next `sample`.

    `rows` int32 [m, 4]: the token; 1 if the logits were finite; the bits of the token's log
    probability (float32); the token's rank. Log probability and rank are undefined unless
    requested. `tops` int32 [m, 2, MAX_TOP]: the ids of the most likely tokens, and the bits of
    their log probabilities. Entries beyond the requested number are undefined.
    """

    rows: Tensor
    tops: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMasks:
    """The allowed tokens of rows: `bits` int32 [n, words], with one bit per token: 1 if it is
    allowed; `rows` int64 [m]: each row's index in `bits`, -1 for an unconstrained row.
    """

    bits: Tensor
    rows: Tensor


class DeviceSampler:
    """Samples for up to `max_num_seqs` slots; padding rows use slot `padding_slot`."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.padding_slot = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._num_chunks = -(-vocab_size // _CHUNK)
        slots, rows = max_num_seqs + 1, max_num_seqs
        self._words = np.zeros((slots, kernels.NUM_WORDS.value), dtype=np.int32)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._table = zeros(*self._words.shape)
        self._counts = zeros(slots, vocab_size, dtype=torch.int16)
        self._counted = zeros(slots)
        self._bias_ids = zeros(slots, MAX_BIASES)
        self._bias_values = zeros(slots, MAX_BIASES, dtype=torch.float32)
        chunks = self._num_chunks
        self._work = zeros(rows, vocab_size, dtype=torch.float32)
        self._best_scores = zeros(rows, chunks, dtype=torch.float32)
        self._best_tokens = zeros(rows, chunks)
        self._masses = zeros(rows, chunks, dtype=torch.float64)
        self._whole_masses = zeros(rows, chunks, dtype=torch.float64)
        self._part_maxima = zeros(rows, chunks * _PARTS, dtype=torch.float32)
        listed = chunks * kernels.LISTED.value
        self._bounds = zeros(rows, dtype=torch.float32)
        self._listed_scores = zeros(rows, listed, dtype=torch.float32)
        self._listed_tokens = zeros(rows, listed)
        self._listed_counts = zeros(rows, chunks)
        self._pending = zeros(rows)
        self._rows = zeros(rows, 4)
        self._tops = zeros(rows, 2, MAX_TOP)
        self._no_masks = TokenMasks(bits=zeros(1, 1), rows=zeros(1, dtype=torch.int64))

    def rejection(self, request: Request) -> str:
        """Return why the device's tables cannot hold the options of `request`, or an empty string
        if they can.
        """
        sampling = request.spec.sampling
        if max(sampling.num_logprobs, 0) > MAX_TOP:
            return f"logprobs: at most {MAX_TOP} alternatives"
        if len(sampling.logit_bias) > MAX_BIASES:
            return f"logit_bias: at most {MAX_BIASES} tokens"
        return ""

    def update(self, batch: Batch, rules: SlotRules) -> None:
        """Copy the options of newly admitted requests to the device; requests in `rules.rejections`
        get greedy sampling. Call it after `rules.update`.
        """
        admitted = [request for request in batch.admitted if request.slot >= 0]
        if not admitted:
            return
        penalised: list[Request] = []
        for request in admitted:
            slot = request.slot
            self._words[slot] = 0
            if slot in rules.rejections:
                continue
            self._words[slot] = _words_of(request)
            if slot in rules.bias:
                self._stage_bias(slot, *rules.bias[slot])
            if self._words[slot, kernels.FLAGS.value] & kernels.PENALISED.value:
                penalised.append(request)
        self._table.copy_(self._staged(self._words), non_blocking=True)
        if penalised:
            self._stage_counts(penalised)

    def plan(self, slots: Ints, positions: Ints) -> SamplePlan:
        """Return the plan of a step that samples the tokens at `positions` [m] of `slots` [m]."""
        words = self._words[slots]
        flags = words[:, kernels.FLAGS.value]
        is_full = (
            (flags != 0)
            | (words[:, kernels.NUM_BIASES.value] > 0)
            | (positions < words[:, kernels.MIN_TOTAL.value])
        )
        wants_logprobs: NDArray[np.bool_] = (flags & kernels.LOGPROBS.value) != 0
        tops = words[wants_logprobs, kernels.NUM_TOP.value]
        return SamplePlan(
            variant=Variant.FULL if is_full.any() else Variant.PLAIN,
            wants_logprobs=wants_logprobs,
            num_top=int(tops.max()) if len(tops) else 0,
        )

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        *,
        variant: Variant,
        masks: TokenMasks | None = None,
    ) -> DeviceSamples:
        """Choose a token for each row, and store it in `last_tokens`; return the results on the
        device.

        `logits` [m, vocabulary] of any float type; `slots`, `positions` int64 [m]: slot of each
        row, and position of the token to sample. `last_tokens` int32 [2 * (slots + 1)]: the token
        of position p of a slot is at `2 * slot + p % 2`, so that a repeated step still finds the
        previous token. `masks` are applied only by Variant.FULL.
        """
        num_rows = len(logits)
        is_full = variant is Variant.FULL
        bits, mask_rows = (masks or self._no_masks).bits, (masks or self._no_masks).rows
        num_chunks = self._num_chunks
        kernels.score_chunks[(num_rows, num_chunks)](
            logits, logits.stride(0), slots, positions, self._table, self._counts, self._counted,
            last_tokens, self._bias_ids, self._bias_values, bits, mask_rows, bits.shape[1],
            self._work, self._best_scores, self._best_tokens, self._masses, self._whole_masses,
            self._part_maxima, self._vocab_size, num_chunks=num_chunks, is_full=is_full,
            has_masks=masks is not None, num_warps=_WARPS,
        )  # fmt: skip
        num_padded = _padded(num_chunks)
        seeds = self._table.view(torch.int64)
        if is_full:
            self._choose(logits, slots, positions, last_tokens, mask_rows, masks is not None)
        else:
            kernels.choose_plain[(num_rows,)](
                logits, logits.stride(0), slots, positions, self._table, seeds, self._best_scores,
                self._best_tokens, self._masses, last_tokens, self._rows, self._vocab_size,
                num_chunks=num_chunks, num_padded=num_padded, num_warps=_WARPS,
            )  # fmt: skip
        return self.outcome(num_rows)

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        mask_rows: Tensor,
        has_masks: bool,
    ) -> None:
        num_rows, num_chunks = len(logits), self._num_chunks
        num_padded = _padded(num_chunks)
        seeds = self._table.view(torch.int64)
        choice.bound_candidates[(num_rows,)](
            slots, self._table, self._part_maxima, self._bounds, num_parts=num_chunks * _PARTS,
            num_padded=num_padded, num_warps=1,
        )  # fmt: skip
        choice.list_candidates[(num_rows, num_chunks)](
            slots, self._table, self._work, self._part_maxima, self._bounds, self._listed_scores,
            self._listed_tokens, self._listed_counts, self._vocab_size, num_chunks=num_chunks,
            num_warps=_WARPS,
        )  # fmt: skip
        choice.choose_listed[(num_rows,)](
            logits, logits.stride(0), slots, positions, self._table, seeds, self._counted,
            mask_rows, self._work, self._best_scores, self._best_tokens, self._masses,
            self._bounds, self._listed_scores, self._listed_tokens, self._listed_counts,
            self._pending, last_tokens, self._rows, self._vocab_size, num_chunks=num_chunks,
            num_padded=num_padded, has_masks=has_masks, num_warps=_WARPS,
        )  # fmt: skip
        choice.choose_searched[(num_rows,)](
            slots, positions, self._table, seeds, self._counted, self._work, self._best_scores,
            self._masses, self._pending, last_tokens, self._rows, self._vocab_size,
            num_chunks=num_chunks, num_padded=num_padded, num_warps=_SEARCH_WARPS,
        )  # fmt: skip
        choice.note_logprobs[(num_rows,)](
            slots, self._table, self._work, self._best_scores, self._whole_masses, self._bounds,
            self._listed_scores, self._listed_tokens, self._listed_counts, self._rows, self._tops,
            self._vocab_size, num_chunks=num_chunks, num_padded=num_padded, num_warps=_WARPS,
        )  # fmt: skip

    def outcome(self, num_rows: int) -> DeviceSamples:
        """Return the memory in which `sample`, or a replay of its captured graph, stores its
        results.
        """
        return DeviceSamples(rows=self._rows[:num_rows], tops=self._tops[:num_rows])

    def _stage_bias(self, slot: int, ids: Ints, values: NDArray[np.float32]) -> None:
        tokens, place = np.unique(ids, return_inverse=True)
        sums = np.zeros(len(tokens), dtype=np.float32)
        np.add.at(sums, place, values)
        self._words[slot, kernels.NUM_BIASES.value] = len(tokens)
        staged = self._staged(tokens.astype(np.int32))
        self._bias_ids[slot, : len(tokens)].copy_(staged, non_blocking=True)
        self._bias_values[slot, : len(tokens)].copy_(self._staged(sums), non_blocking=True)

    def _stage_counts(self, requests: list[Request]) -> None:
        """Count the tokens of the requests' prompts and outputs; replace their slots' counts."""
        slots = np.array([request.slot for request in requests], dtype=np.int64)
        places: list[Ints] = []
        values: list[NDArray[np.int16]] = []
        for request in requests:
            tokens, counts = _packed_counts(request)
            places.append(request.slot * self._vocab_size + tokens)
            values.append(counts)
        lengths = np.array([len(request.tokens) for request in requests], dtype=np.int32)
        at = self._staged(slots).to(self._device, non_blocking=True)
        self._counts.index_fill_(0, at, 0)
        self._counts.view(-1).index_copy_(
            0,
            self._staged(np.concatenate(places)).to(self._device, non_blocking=True),
            self._staged(np.concatenate(values)).to(self._device, non_blocking=True),
        )
        staged = self._staged(lengths).to(self._device, non_blocking=True)
        self._counted.index_copy_(0, at, staged)

    def _staged(self, values: NDArray[Any]) -> Tensor:
        """Return a copy that the device can read asynchronously: for CUDA, in pinned memory."""
        staged = torch.from_numpy(values)
        return staged.pin_memory() if self._device.type == "cuda" else staged.clone()


def read_samples(
    rows: NDArray[np.int32], tops: NDArray[np.int32] | None, plan: SamplePlan
) -> tuple[NDArray[np.int32], NDArray[np.bool_], TokenLogprobs | None]:
    """Return the token of each row, whether the row's logits were finite, and the log probabilities
    of the tokens (None if no row requests log probabilities).

    `rows`, `tops`: host copies of `DeviceSamples`; `tops` may be None if no row requests logprobs.
    """
    tokens, is_good = rows[:, 0].copy(), rows[:, 1] != 0
    if not plan.wants_logprobs.any():
        return tokens, is_good, None
    num_top = plan.num_top
    none: NDArray[np.int32] = np.zeros((len(rows), 2, 0), dtype=np.int32)
    asked = np.where(plan.wants_logprobs[:, None, None], none if tops is None else tops, 0)
    return (
        tokens,
        is_good,
        TokenLogprobs(
            chosen=np.where(plan.wants_logprobs, rows[:, 2].copy().view(np.float32), 0.0).astype(
                np.float32
            ),
            ranks=np.where(plan.wants_logprobs, rows[:, 3], 0).astype(np.int32),
            top_ids=asked[:, 0, :num_top].astype(np.int32),
            top_logprobs=asked[:, 1, :num_top].astype(np.int32).view(np.float32),
        ),
    )


def _padded(count: int) -> int:
    """Return the lowest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _words_of(request: Request) -> NDArray[np.int32]:
    """Return the request's row of the options table, as 32-bit words."""
    spec, sampling = request.spec, request.spec.sampling
    words = np.zeros(kernels.NUM_WORDS.value, dtype=np.int32)
    numbers = words.view(np.float32)
    is_drawn = sampling.temperature > 0.0
    numbers[kernels.TEMPERATURE.value] = (
        max(sampling.temperature, _LEAST_TEMPERATURE) if is_drawn else 0.0
    )
    numbers[kernels.TOP_P.value] = sampling.top_p
    numbers[kernels.MIN_P_LOG.value] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    numbers[kernels.REPETITION.value] = sampling.repetition_penalty
    numbers[kernels.PRESENCE.value] = sampling.presence_penalty
    numbers[kernels.FREQUENCY.value] = sampling.frequency_penalty
    words[kernels.TOP_K.value] = sampling.top_k
    words[kernels.NUM_TOP.value] = max(sampling.num_logprobs, 0)
    words[kernels.MIN_TOTAL.value] = spec.num_original_prompt_tokens + spec.num_stop_banned_tokens
    words.view(np.uint64)[kernels.SEED.value // 2] = sampling.seed
    stops = kernels.STOPS.value
    words[stops : stops + kernels.MAX_STOPS.value] = -1
    words[stops : stops + len(spec.stop_ids)] = spec.stop_ids
    is_penalised = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
    is_cut = is_drawn and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    words[kernels.FLAGS.value] = (
        is_penalised * kernels.PENALISED.value
        + is_cut * kernels.CUT.value
        + (sampling.num_logprobs >= 0) * kernels.LOGPROBS.value
    )
    return words


def _packed_counts(request: Request) -> tuple[Ints, NDArray[np.int16]]:
    """Return the request's distinct tokens and, for each, its entry in the table of counts: how
    often it occurs in the output, and the bit IN_PROMPT if it occurs in the prompt.
    """
    num_prompt = request.spec.num_original_prompt_tokens
    tokens, place = np.unique(request.tokens, return_inverse=True)
    outputs = np.bincount(place[num_prompt:], minlength=len(tokens))
    packed = np.minimum(outputs, kernels.MAX_COUNT.value)
    packed[place[:num_prompt]] |= kernels.IN_PROMPT.value
    return tokens.astype(np.int64), packed.astype(np.int16)
