"""The interface between the scheduler and an executor.

Implementations are in `penstock.executor`; the server's start-up code selects one.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.batch import Batch, StepResult


class Feature(enum.Enum):
    """Features of an executor beyond plain sampling. A request that needs a missing feature is
    rejected; the feature is never ignored.
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
    """The limits and properties of a constructed executor, as opposed to its settings. Raises
    ValueError if a self-paced executor has a pipeline depth other than 1.

    Attributes:
        block_size: Tokens of one KV cache block.
        max_num_seqs: Number of slots.
        max_seq_len: The bound on prompt and output together, in tokens.
        max_prompt_tokens: The bound on the prompt alone; None: no separate bound.
        adapters: Names of the adapters that requests may use.
        pipeline_depth: Steps that may be launched before the oldest is collected, 1 or 2.
        resources: Device, number format and memory use, for logs.
        quantization: The quantization of the weights, "none" if they are not quantized, "" if
            unknown.
        kv_cache_dtype: The number format of keys and values, "" if unknown.
        is_self_paced: The executor wraps an engine with its own batching. It gets whole prompts. A
            step passes admissions and releases to it. `collect` never waits: it returns what has
            arrived since the last call, and a slot without tokens in a result is still running.
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
        """Return the number of tokens that the cache must hold for a request of this final length.

        The last token is sampled and never computed, so it needs no space. A self-paced engine
        reserves space for it all the same.
        """
        return num_total_tokens if self.is_self_paced else num_total_tokens - 1


class ExecutorDied(Exception):
    """The executor has failed as a whole; all of its requests are lost."""


class Executor(Protocol):
    """The interface of an executor. An executor runs one model on one group of devices. Called from
    one thread.

    Steps take effect in launch order: a later step sees every key and value that an earlier step
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
        """Start one step. If the device is asynchronous, return before the step is done."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result.

        A self-paced executor returns immediately, and may be called when nothing is launched.
        """
        ...

    def close(self) -> None:
        """Release all resources. Launched steps may be dropped. Idempotent."""
        ...
