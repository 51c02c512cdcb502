"""A launched step: the data needed to evaluate its results on the host.

Holds the host memory of the results, and converts them to tokens, failures and log probabilities.
Reads nothing that later steps change.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.computed_step import step_result
from penstock.executor.torch.cuda.device_queue import DeviceQueue, Mark
from penstock.executor.torch.cuda.device_sampler import (
    MAX_TOP,
    DeviceSamples,
    SamplePlan,
    read_samples,
)
from penstock.executor.torch.prompt_logprobs import PromptRows
from penstock.scheduler.batch import Batch, StepResult, TokenLogprobs


class OutcomeMemory:
    """Pinned memory for the results of one step of up to `max_rows` rows. It has flags for
    `max_tokens` tokens; `fetch_flags` allocates more if a step has more tokens.
    """

    def __init__(self, queue: DeviceQueue, *, max_rows: int, max_tokens: int) -> None:
        self._queue = queue
        self._flags = queue.pinned((max_tokens,), torch.bool)
        self._rows = queue.pinned((max_rows, 4), torch.int32)
        self._tops = queue.pinned((max_rows, 2, MAX_TOP), torch.int32)

    def fetch(self, samples: DeviceSamples, *, has_tops: bool) -> None:
        """Enqueue an asynchronous copy of the samples to the host, and of their top log
        probabilities if `has_tops`.
        """
        num_rows = len(samples.rows)
        self._rows[:num_rows].copy_(samples.rows, non_blocking=True)
        if has_tops:
            self._tops[:num_rows].copy_(samples.tops, non_blocking=True)

    def fetch_flags(self, flags: Tensor) -> Tensor:
        """Queue the copy of `flags` bool [tokens] to the host; return its destination."""
        if len(self._flags) < len(flags):
            self._flags = self._queue.pinned((len(flags),), torch.bool)
        fetched = self._flags[: len(flags)]
        fetched.copy_(flags, non_blocking=True)
        return fetched

    def rows(self, num_rows: int) -> NDArray[np.int32]:
        """Return the fetched `DeviceSamples.rows`, int32 [num_rows, 4]."""
        found: NDArray[np.int32] = self._rows[:num_rows].numpy()
        return found

    def tops(self, num_rows: int) -> NDArray[np.int32]:
        """Return the fetched `DeviceSamples.tops`, int32 [num_rows, 2, MAX_TOP]."""
        found: NDArray[np.int32] = self._tops[:num_rows].numpy()
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchedPrompt:
    """Log probabilities of one request's prompt, while they are copied to the host.

    `parts`, in host memory: the log probabilities [n] and the ranks [n] of the n prompt tokens, the
    ids [n, num_top] of the most likely tokens, and their log probabilities [n, num_top].
    """

    rows: PromptRows
    parts: tuple[Tensor, Tensor, Tensor, Tensor]

    def read(self) -> tuple[int, int, TokenLogprobs]:
        """Return slot, first position and log probabilities, as in `StepResult.prompt_logprobs`.
        Call it only when the device has completed the step.
        """
        chosen, ranks, top_ids, top_logprobs = (part.numpy() for part in self.parts)
        logprobs = TokenLogprobs(
            chosen=chosen, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs
        )
        return self.rows.slot, self.rows.first_position, logprobs


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceStep:
    """A launched step. `slots`: the sampled slots. `row_slots`: the slots of all rows. `plan`: None
    if no row is sampled. `memory`: receives the results. `rejections`: slots that must fail, with
    the reasons. `mark`: the end of the step in the device's queue.

    `token_flags` bool [tokens] on the host: whether each token's keys and values are finite; None
    if every token's logits are sampled; then the logits are checked instead. `token_ends` [rows]:
    the end of each row in `token_flags`.
    """

    slots: NDArray[np.int32]
    row_slots: NDArray[np.int32]
    plan: SamplePlan | None
    memory: OutcomeMemory
    rejections: dict[int, str]
    mark: Mark | None = None
    token_flags: Tensor | None = None
    token_ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    prompts: tuple[LaunchedPrompt, ...] = ()

    def wait(self) -> StepResult:
        """Wait for the results and return them. Raises RuntimeError if the device failed."""
        if self.mark is not None:
            self.mark.wait()
        return self._to_result()

    def _to_result(self) -> StepResult:
        slots = self.slots
        num_rows = len(slots)
        failures: dict[int, str] = {}
        tokens: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        logprobs: TokenLogprobs | None = None
        if self.plan is not None:
            has_tops = bool(self.plan.wants_logprobs.any())
            tokens, is_good, logprobs = read_samples(
                self.memory.rows(num_rows),
                self.memory.tops(num_rows) if has_tops else None,
                self.plan,
            )
            if not is_good.all():
                failures = dict.fromkeys(slots[~is_good].tolist(), "logits are not finite")
        failures |= self._broken_chunks()
        failures |= self.rejections
        prompts = (prompt.read() for prompt in self.prompts)
        return step_result(slots, tokens, logprobs, prompts, failures)

    def _broken_chunks(self) -> dict[int, str]:
        if self.token_flags is None or bool(self.token_flags.all()):
            return {}
        num_bad = np.concatenate(([0], np.cumsum(~self.token_flags.numpy())))
        starts = np.concatenate(([0], self.token_ends[:-1]))
        is_bad = num_bad[self.token_ends] > num_bad[starts]
        return dict.fromkeys(self.row_slots[is_bad].tolist(), "keys or values are not finite")


def launched_step_of(batch: Batch, memory: OutcomeMemory, rejections: dict[int, str]) -> DeviceStep:
    """Return the record of a step that is about to be queued, without its plan, mark, flags and
    prompts. `rejections` maps a slot to the reason why its request cannot run.
    """
    found: dict[int, str] = {}
    if rejections:
        found = {slot: rejections[slot] for slot in batch.slots.tolist() if slot in rejections}
    return DeviceStep(
        slots=batch.sampled_slots,
        row_slots=batch.slots,
        plan=None,
        memory=memory,
        rejections=found,
    )
