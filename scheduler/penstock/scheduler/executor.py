"""The executor seam, owned by its consumer.

Owns the protocol that every engine under the scheduler implements. Implementations live in
`penstock.executor` and are chosen in the server's composition root.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.batch import Batch, StepResult


class Feature(enum.Enum):
    """What an executor may offer beyond plain sampling. What it lacks is refused, never ignored."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGIT_BIAS = "logit_bias"
    PENALTIES = "penalties"
    CONSTRAINT = "constraint"
    ADAPTER = "adapter"
    IMAGES = "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """The limits of a built executor: results, never wishes.

    `block_size` is in tokens. `max_seq_len` bounds prompt and output together, in tokens.
    `pipeline_depth`: steps that may be launched before the oldest is collected (1 or 2).
    """

    name: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_seq_len: int
    max_num_seqs: int
    pipeline_depth: int = 1
    features: frozenset[Feature] = frozenset()


class ExecutorDied(Exception):
    """The executor as a whole can do no more; every request in it is lost to it."""


class Executor(Protocol):
    """One model on one device group. One thread calls it.

    Steps take effect in launch order: a later step sees every key and value an earlier one wrote.
    A request that fails alone is reported in `StepResult.failures`; an exception out of `launch`
    or `collect` means the executor is dead.
    """

    @property
    def info(self) -> ExecutorInfo:
        """Limits and features, fixed after construction."""
        ...

    def launch(self, batch: Batch) -> None:
        """Start one step; return at once where the device allows."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its outcome."""
        ...

    def close(self) -> None:
        """Give everything back. Launched steps may be dropped. Idempotent."""
        ...
