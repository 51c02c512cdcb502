"""A request: its specification (`RequestSpec`, immutable), its options and its progress
(`Request`).

Defines the values that pass from the front (gRPC server process) to the scheduler and to the
executor. They contain no prompt or output text and no protobuf; `key` is an opaque number chosen by
the sender. An executor's features list the options that it supports; the front rejects other
options, so the scheduler passes options on unread. The exception is retention, which the scheduler
applies itself if it manages the blocks (block_pool.py).
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.state import RequestEvent, RequestState, transition


class ConstraintKind(enum.IntEnum):
    """Kind of an output constraint: JSON_SCHEMA, REGEX, GRAMMAR (EBNF) or CHOICE (fixed texts)."""

    JSON_SCHEMA = 1
    REGEX = 2
    GRAMMAR = 3
    CHOICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The format that an output must have.

    `texts`: one text with the schema, the pattern or the EBNF grammar (start symbol `root`); for
    CHOICE all allowed outputs. Raises ValueError for an empty text or a wrong number of texts.
    """

    kind: ConstraintKind
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise ValueError("constraint must have texts, none of them empty")
        if self.kind is not ConstraintKind.CHOICE and len(self.texts) != 1:
            raise ValueError(f"constraint of kind {self.kind.name} must have one text")


DEFAULT_RETENTION_LEVEL: Final = 35
"""Level of blocks without a retention, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRetention:
    """Eviction priority of the blocks that a request leaves in the prefix cache.

    `level`: 0 to 100, lower levels are evicted first. `duration_s`: how long the level applies
    after the request has released its blocks, seconds; may be infinite. Raises ValueError for a
    value out of range.
    """

    level: int = DEFAULT_RETENTION_LEVEL
    duration_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 100:
            raise ValueError("retention level must be in 0 .. 100")
        if not self.duration_s > 0:
            raise ValueError("retention duration_s must be positive")


NO_TIME = math.inf
"""No deadline: a time on the engine's clock, seconds, that is never reached."""
MAX_STOP_IDS = 32
"""Maximum stop ids per request, end-of-sequence ids included."""


class FinishReason(enum.IntEnum):
    """Why a COMPLETED request ended: a stop token, its length limit, its time limit, or its
    cancellation.
    """

    STOP = 1
    LENGTH = 2
    TIME_LIMIT = 3
    CANCELLED = 4


class FailureReason(enum.IntEnum):
    """Why a request ended in ERROR, or was rejected."""

    QUEUE_FULL = 1
    REQUEST_ID_IN_USE = 2
    EXCEEDS_KV_CACHE = 3
    PROMPT_TOO_LONG = 4
    TTFT_DEADLINE_EXCEEDED = 5
    DEADLINE_EXCEEDED = 6
    EXECUTOR_REQUEST_FAILED = 7
    ENGINE_DOWN = 8
    DRAINING = 9
    EXECUTOR_REJECTED = 10
    TENANT_OVER_QUOTA = 11
    TTFT_DEADLINE_UNREACHABLE = 12
    DEADLINE_UNREACHABLE = 13
    CONSTRAINT_REJECTED = 14
    TOO_MANY_OUTPUTS = 15


UNTRUSTED_ENDS = frozenset(
    {
        FailureReason.EXECUTOR_REQUEST_FAILED,
        FailureReason.EXECUTOR_REJECTED,
        FailureReason.CONSTRAINT_REJECTED,
    }
)
"""Executor failures, after which no block that the request wrote may be reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is sampled. All values have been validated.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean off. Penalties follow the
    usual definitions: `repetition_penalty` divides (or multiplies, when negative) the logits of
    tokens seen in prompt or output, `presence_penalty` and `frequency_penalty` are subtracted for
    tokens seen in the output. `logit_bias`: pairs of a token id and the value added to its logit.
    The random number of the token at absolute position p (prompt included) is a function of
    (`seed`, p) alone. `num_logprobs` is -1 for none, 0 for the chosen token only, k for the k most
    likely in addition to it; `num_prompt_logprobs`: the same for the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether cached blocks cannot be used: prompt log probabilities need the logits of every
        prompt token.
        """
        return self.num_prompt_logprobs >= 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSpec:
    """One requested output, which takes one slot while it runs.

    A client's request for n outputs is n specs: the first is the leader, the others name it in
    `leader_key` and wait until its prompt is computed, so that they can share the prompt's full
    blocks. (They do not wait if the prompt has no full block.)

    Times are absolute seconds on the engine's clock, `NO_TIME` for none. Raises ValueError for
    numbers that are out of range or inconsistent.

    Attributes:
        key: Unique among live requests, 0 < key < 2**63.
        prompt_ids: Prompt tokens, int32 [num_prompt].
        min_tokens: Minimum output length; set to `max_tokens` if nothing else can end the output.
        num_replayed: How many of `prompt_ids`, counted from the end, were generated before a
            replay. They count as output for penalties, `max_tokens` and `min_tokens`.
        num_replays: How often the request was resubmitted after its engine died. A replayed request
            was admitted before, so no limit, forecast or quota rejects it.
        stop_ids: Token ids that end the output (end-of-sequence ids included unless ignored).
        block_hashes: One digest per full block of the prompt, chained from `hash_salt`.
        hash_salt: The salt that prefix hashes start from (see block_hash.py); empty to disable
            prefix reuse.
        priority: Higher is more urgent.
        adapter: Name of an adapter, empty for none; the salt must differ between adapters.
        tenant: The tenant; the fair order shares the engine among tenants.
        session_id: The session of the tenant that this request is a turn of, empty for none; its
            blocks are kept for the next turn (see sessions.py).
        trace_id: 16 bytes, or empty; used for traces only.
    """

    key: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    max_tokens: int
    min_tokens: int = 0
    num_replayed: int = 0
    num_replays: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    hash_salt: bytes = b""
    leader_key: int = 0
    output_index: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    ttft_deadline_s: float = NO_TIME
    deadline_s: float = NO_TIME
    time_limit_s: float = NO_TIME
    adapter: str = ""
    constraint: Constraint | None = None
    retention: CacheRetention | None = None
    tenant: str = ""
    session_id: str = ""
    trace_id: bytes = b""

    def __post_init__(self) -> None:
        if not 0 < self.key < 2**63:
            raise ValueError("key must be in 1 .. 2**63 - 1")
        if not 0 <= self.num_replayed < len(self.prompt_ids):
            raise ValueError("prompt_ids must contain a token that was not replayed")
        if self.num_replays < 0:
            raise ValueError("num_replays must not be negative")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens must be in 0 .. max_tokens")
        if self.num_replayed >= self.max_tokens:
            raise ValueError("max_tokens must exceed num_replayed")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids may have at most {MAX_STOP_IDS} entries")

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens as submitted, replayed output included."""
        return len(self.prompt_ids)

    @property
    def num_original_prompt_tokens(self) -> int:
        """Number of tokens in the client's own prompt, without replayed output."""
        return len(self.prompt_ids) - self.num_replayed

    @property
    def num_stop_banned_tokens(self) -> int:
        """Number of first output tokens that must not be a stop id; 0 without stop ids."""
        return self.min_tokens if self.stop_ids else 0

    @property
    def max_total_tokens(self) -> int:
        """Length, prompt and output together, at which the request ends with LENGTH."""
        return self.num_original_prompt_tokens + self.max_tokens


class PredictedTime(NamedTuple):
    """The times predicted for a waiting request.

    `at_s`: when they were predicted, on the engine's clock. `prefill_s`: seconds from admission to
    the next token. `token_s`: seconds per further token.
    """

    at_s: float
    prefill_s: float
    token_s: float


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one live request. Only the scheduler writes to it.

    Attributes:
        tokens: int32 [n]; all tokens while the request is PENDING (prompt, and output after a
            preemption); stale while PROCESSING, when they are in the slot arrays.
        block_hashes: The digests of its full blocks: first of the prompt, then of the output as its
            blocks are registered.
        tenant: The tenant's index in `TenantCounters` while the request is live, before that -1.
        ticket: Identifies its valid entries in the heaps of the queue order; -1 while it is not in
            the order.
        blocked_since_s: When it first was at the head of the queue and did not fit.
        num_overtaken: How many requests have overtaken it since `blocked_since_s`.
        num_blocks_needed: How many available blocks its admission needed when it last did not fit.
        num_tenant_preemptions: How often it was preempted for another tenant.
        recheck_s: While it waits, when to check whether it can still meet its deadlines.
        num_uncached_tokens: Number of tokens to compute, as of when it joined the queue.
        num_blocks: Number of blocks that its admission takes, as of when it joined the queue.
        num_expected_tokens: The expected number of tokens still to generate, as of when it joined
            the queue.
        is_trial: Whether it is exempt from rejection by predictions: a replay, or a request
            admitted to measure the machine's speed or output lengths.
        is_new: Whether its tenant has too few ended outputs to predict from, so that only the
            bounds of its output are used.
        predicted_time: The last prediction while it waited; compared with the actual times at its
            end. None without a prediction.
        wait_index: While the request waits, its index in the columns of wait_clock.py.
        queue_mark: While the request waits, the time when it joined the queue, and the counters of
            wait_clock.py at that time.
    """

    spec: RequestSpec
    sequence: int
    tokens: NDArray[np.int32]
    block_hashes: list[bytes]
    slot: int = -1
    num_registered_blocks: int = 0
    num_preemptions: int = 0
    first_token_s: float = NO_TIME
    tenant: int = -1
    ticket: int = -1
    num_overtaken: int = 0
    blocked_since_s: float = NO_TIME
    num_blocks_needed: int = 0
    num_tenant_preemptions: int = 0
    recheck_s: float = NO_TIME
    num_uncached_tokens: int = 0
    num_blocks: int = 0
    num_expected_tokens: int = 0
    is_trial: bool = False
    is_new: bool = False
    predicted_time: PredictedTime | None = None
    wait_index: int = -1
    queue_mark: tuple[float, tuple[int, ...]] | None = None
    _state: RequestState = RequestState.PENDING

    @property
    def state(self) -> RequestState:
        """Current state; only `apply` changes it."""
        return self._state

    @property
    def seniority(self) -> tuple[int, int]:
        """Sort key by class and arrival, smallest for the highest class and earliest arrival. Under
        FCFS, requests are admitted in this order and preempted in the opposite one.
        """
        return (-self.spec.priority, self.sequence)

    @property
    def expiry_s(self) -> float:
        """When the request expires, on the engine's clock: its earliest deadline or its time limit.
        The TTFT deadline counts only until the first token.
        """
        spec = self.spec
        ttft = spec.ttft_deadline_s if self.first_token_s == NO_TIME else NO_TIME
        return min(spec.deadline_s, spec.time_limit_s, ttft)

    def apply(self, event: RequestEvent) -> None:
        """Apply the transition that `event` causes; raise IllegalTransition, and change nothing, if
        there is none (see state.py).
        """
        self._state = transition(self._state, event)
