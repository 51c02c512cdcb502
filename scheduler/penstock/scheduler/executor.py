"""The executor interface, owned by its consumer.

Every engine under the scheduler implements this protocol. Implementations are in
`penstock.executor` and are chosen in the server's composition root.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.batch import Batch, StepResult


class Feature(enum.Enum):
    """Features of an executor beyond plain sampling. Requests for a missing feature are refused; it
    is never ignored.
    """

    SEED = "seed"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    LOGIT_BIAS = "logit_bias"
    PENALTIES = "penalties"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    ADAPTERS = "adapters"
    CACHE_RETENTION = "cache_retention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """The limits of an executor as built, not its settings.

    `block_size` is in tokens. `max_seq_len` bounds prompt and output together, in tokens;
    `max_prompt_tokens` a prompt alone, None for no separate bound. `adapters`: names of its
    adapters. `pipeline_depth`: steps that may be launched before the oldest is collected (1 or 2).
    `resources`: its device, number format and memory use, for logs. `quantization`: that of
    the weights, "none" if they are not quantized; `kv_cache_dtype`: the number format of keys and
    values; both are "" if unknown.

    `is_self_paced`: it wraps an engine with its own batching. It gets whole prompts, a step passes
    admissions and releases to it, and the result of a step is everything that arrived since the
    last one: `collect` never waits, and a slot without tokens in a result is still running.
    """

    name: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_seq_len: int
    max_num_seqs: int
    pipeline_depth: int = 1
    features: frozenset[Feature] = frozenset()
    max_prompt_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    is_self_paced: bool = False
    resources: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""

    def __post_init__(self) -> None:
        if self.is_self_paced and self.pipeline_depth != 1:
            raise ValueError("a self-paced executor has a pipeline_depth of 1")

    def num_kept_tokens(self, num_total_tokens: int) -> int:
        """Return how many tokens a request of that final length needs room for in the cache.

        The last token is sampled and never computed; a self-paced engine still reserves room for it
        before it runs a request.
        """
        return num_total_tokens if self.is_self_paced else num_total_tokens - 1


class ExecutorDied(Exception):
    """The executor as a whole has failed; all its requests are lost."""


class Executor(Protocol):
    """One model on one device group. One thread calls it.

    Steps take effect in launch order: a later step sees every key and value that an earlier one
    wrote. A request that fails alone is reported in `StepResult.failures`; an exception from
    `launch` or `collect` means that the executor has failed.
    """

    @property
    def info(self) -> ExecutorInfo:
        """Limits and features, fixed after construction."""
        ...

    @property
    def ready_fd(self) -> int | None:
        """A descriptor that is readable when a self-paced executor has results; None for others."""
        ...

    def launch(self, batch: Batch) -> None:
        """Start one step; return at once where the device allows it."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its outcome.

        A self-paced executor returns at once, and may be called when nothing is launched.
        """
        ...

    def close(self) -> None:
        """Release all resources. Launched steps may be dropped. Idempotent."""
        ...
