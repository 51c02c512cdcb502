"""Computes a step: the forward pass, the sampled tokens, and the log probabilities of prompts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.executor.torch.prompt_logprobs import PromptRows, prompt_logprobs, prompt_rows
from penstock.executor.torch.sampler import Sampled, sample
from penstock.executor.torch.slot_rules import SlotRules
from penstock.executor.torch.step_forward import ForwardResult, StepForward
from penstock.executor.torch.step_inputs import Ints
from penstock.scheduler.batch import Batch, SlotFailure, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedStep:
    """The results of one step. `forwarded`: the result of the forward pass. `sampled`: the sampled
    tokens, aligned with the batch's `sampled_slots`. `prompt_logprobs`: see `StepResult`.
    """

    forwarded: ForwardResult
    sampled: Sampled
    prompt_logprobs: list[tuple[int, int, TokenLogprobs]]


def compute_step(forward: StepForward, batch: Batch, rules: SlotRules) -> ComputedStep:
    """Run the forward pass of a batch with at least one row, sample a token for each of its
    `sampled_slots`, and compute the requested log probabilities of prompt tokens.
    """
    sampled_rows = rows_of(batch, batch.sampled_slots)
    prompts: list[PromptRows] = []

    def choose(last_of_row: Ints) -> Ints:
        prompts.extend(prompt_rows(batch, last_of_row))
        return np.concatenate([last_of_row[sampled_rows], *(prompt.packed for prompt in prompts)])

    forwarded = forward.run(batch, choose)
    slots = batch.sampled_slots.astype(np.int64)
    positions = (batch.starts + batch.num_tokens)[sampled_rows].astype(np.int64)
    logits = forwarded.logits
    return ComputedStep(
        forwarded=forwarded,
        sampled=sample(logits[: len(slots)], batch.arrays, slots, positions, rules),
        prompt_logprobs=prompt_logprobs(logits[len(slots) :], prompts),
    )


def step_result(
    slots: NDArray[np.int32],
    tokens: NDArray[np.int32],
    logprobs: TokenLogprobs | None,
    prompts: Iterable[tuple[int, int, TokenLogprobs]],
    failures: Mapping[int, str],
) -> StepResult:
    """Return the result of a step, without tokens and log probabilities of the slots that failed.

    `tokens` [m] and `logprobs` are aligned with `slots` [m]. `prompts`: see
    `StepResult.prompt_logprobs`. `failures`: the reason for each slot that failed.
    """
    if failures:
        good = np.flatnonzero(~np.isin(slots, list(failures)))
        slots, tokens = slots[good], tokens[good]
        logprobs = None if logprobs is None else logprobs.take(good)
    return StepResult(
        slots=slots,
        tokens=tokens,
        logprobs=logprobs,
        prompt_logprobs=tuple(found for found in prompts if found[0] not in failures),
        failures=tuple(SlotFailure(slot=slot, detail=why) for slot, why in failures.items()),
    )


def rows_of(batch: Batch, slots: NDArray[np.int32]) -> Ints:
    """Return the batch rows of `slots`, in the order of `slots`; each slot must be in the batch."""
    row_of_slot = np.zeros(batch.arrays.num_slots, dtype=np.int64)
    row_of_slot[batch.slots] = np.arange(batch.num_rows)
    return row_of_slot[slots]
