"""A request: its specification (`RequestSpec`, immutable), its options and its progress
(`Request`).

Owns the values that pass from the front to the scheduler and to the executor. Does not know text,
protobuf, or the origin of the request: `key` is an opaque number that its sender chose. An
executor's features list the options that it supports; the front refuses the others, so the
scheduler passes options on without reading them. It applies only retention itself, where it owns
the blocks (block_pool.py).
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.state import RequestEvent, RequestState, transition


class ConstraintKind(enum.IntEnum):
    """The languages of a constraint."""

    JSON_SCHEMA = 1
    REGEX = 2
    GRAMMAR = 3
    CHOICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The format an output must have.

    `texts`: the schema, the pattern or the EBNF grammar (start symbol `root`), one text; for CHOICE
    the allowed outputs.
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
    """How long a request's cached blocks are kept: a lower `level` (0 to 100) is evicted earlier.

    `duration_s`: how long the level holds after the request, seconds; infinite for no end.
    """

    level: int = DEFAULT_RETENTION_LEVEL
    duration_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 100:
            raise ValueError("retention level must be in 0 .. 100")
        if not self.duration_s > 0:
            raise ValueError("retention duration_s must be positive")


NO_TIME = math.inf
"""A deadline that never comes, seconds on the engine's clock."""
MAX_STOP_IDS = 32
"""Maximum stop ids per request, end-of-sequence ids included."""


class FinishReason(enum.IntEnum):
    """Why a COMPLETED request ended."""

    STOP = 1
    LENGTH = 2
    TIME_LIMIT = 3
    CANCELLED = 4


class FailureReason(enum.IntEnum):
    """Why a request ended in ERROR, or was refused."""

    QUEUE_FULL = 1
    REQUEST_ID_IN_USE = 2
    EXCEEDS_KV_CACHE = 3
    PROMPT_TOO_LONG = 4
    TTFT_DEADLINE_EXCEEDED = 5
    DEADLINE_EXCEEDED = 6
    EXECUTOR_REQUEST_FAILED = 7
    ENGINE_DOWN = 8
    DRAINING = 9
    EXECUTOR_REFUSED = 10
    TENANT_OVER_QUOTA = 11
    TTFT_DEADLINE_UNREACHABLE = 12
    DEADLINE_UNREACHABLE = 13
    CONSTRAINT_REFUSED = 14
    TOO_MANY_OUTPUTS = 15


UNTRUSTED_ENDS = frozenset(
    {
        FailureReason.EXECUTOR_REQUEST_FAILED,
        FailureReason.EXECUTOR_REFUSED,
        FailureReason.CONSTRAINT_REFUSED,
    }
)
"""Failures of the executor: no block that the request wrote may be reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is sampled. Every value is validated before.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean off. Penalties follow the
    usual definitions: `repetition_penalty` divides (or multiplies, when negative) the logits of
    tokens seen in prompt or output, `presence_penalty` and `frequency_penalty` are subtracted for
    tokens seen in the output. The random number of the token at absolute position p (prompt
    included) is a function of (`seed`, p) alone. `num_logprobs` is -1 for none, 0 for the chosen
    token only, k for the k most likely in addition; `num_prompt_logprobs`: the same for the prompt.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSpec:
    """One requested output: one slot when it runs.

    A client's request for n outputs is n specs: the first is the leader, the others name it in
    `leader_key` and wait until its prompt is computed, so that they share the prompt's blocks.

    `key`: unique among live requests, 0 < key < 2**63. `prompt_ids`: int32 [num_prompt].
    `num_replayed`: how many of `prompt_ids`, counted from the end, were generated before a replay:
    they count as output for penalties, `max_tokens` and `min_tokens`. `num_replays`: how often the
    request was lost with an engine and resubmitted: it was admitted before, so no limit, forecast
    or quota refuses it now. `hash_salt`: the salt that prefix hashes start from (see
    block_hash.py); empty for no prefix reuse. `block_hashes`: one digest per full block of the
    prompt, chained from that salt. `stop_ids`: token ids that end the output (end-of-sequence ids
    included unless ignored). `min_tokens`: minimum output length; `max_tokens` if nothing else ends
    the output. Times are absolute seconds on the engine's clock, `NO_TIME` for none. Higher
    `priority` is more urgent. `adapter`: name of an adapter, empty for none; the salt must differ
    between adapters. `tenant`: its tenant; tenants share the engine by their past service.
    `session_id`: the tenant's name of the session that this is a turn of; its blocks are kept for
    the next turn (see sessions.py); empty for none. `trace_id`: 16 bytes for traces, or none; no
    decision depends on it.
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
            raise ValueError("prompt_ids must hold a token that was not replayed")
        if self.num_replays < 0:
            raise ValueError("num_replays must be 0 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens must be in 0 .. max_tokens")
        if self.num_replayed >= self.max_tokens:
            raise ValueError("max_tokens must exceed num_replayed")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids may hold at most {MAX_STOP_IDS}")

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the request was submitted with, replayed ones included."""
        return len(self.prompt_ids)

    @property
    def num_original_prompt_tokens(self) -> int:
        """Tokens of the client's prompt, which penalties do not count as output."""
        return len(self.prompt_ids) - self.num_replayed

    @property
    def num_barred_tokens(self) -> int:
        """Number of output tokens before any stop id is allowed; 0 without stop ids."""
        return self.min_tokens if self.stop_ids else 0

    @property
    def max_total_tokens(self) -> int:
        """Length, prompt and output together, at which the request ends with LENGTH."""
        return self.num_original_prompt_tokens + self.max_tokens


class PredictedTime(NamedTuple):
    """The predicted times at an admission: to the next token, and per further token."""

    at_s: float
    prefill_s: float
    token_s: float


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one live request. Only the scheduler writes to it.

    `tokens` int32 [n]: all tokens while the request is PENDING (prompt, and output after a
    preemption); stale while PROCESSING, when they are in the slot arrays. `block_hashes` are the
    digests of its full blocks as far as they are known. `tenant`: the tenant's index while the
    request is live. `ticket`: its place in the order of the queue, -1 without one. `num_overtaken`
    and `blocked_since_s`: how many requests overtook it since it first was at the head without
    fitting, and since when; `num_blocks_short`: how many blocks it needed when it last did not fit.
    `num_tenant_preemptions`: how often it was preempted for another tenant. `recheck_s`: while it
    waits, when to check whether it can still meet its deadlines. `num_uncached_tokens`: tokens that
    it had to compute when it joined the queue; `num_kept_tokens`: blocks that its admission takes,
    in tokens; `num_expected_tokens`: its expected output. `is_trial`: it runs despite predictions,
    as a replay does. `is_new`: few outputs of its tenant were seen, so only its certain bounds are
    used. `predicted_time`: None unless its completion was predicted. While it waits, `place`: its
    place in the columns of wait_clock.py; `queue_mark`: the time when it joined the queue, and the
    counters at that time.
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
    num_blocks_short: int = 0
    num_tenant_preemptions: int = 0
    recheck_s: float = NO_TIME
    num_uncached_tokens: int = 0
    num_kept_tokens: int = 0
    num_expected_tokens: int = 0
    is_trial: bool = False
    is_new: bool = False
    predicted_time: PredictedTime | None = None
    place: int = -1
    queue_mark: tuple[float, tuple[int, ...]] | None = None
    _state: RequestState = RequestState.PENDING

    @property
    def state(self) -> RequestState:
        """Current state; only `apply` changes it."""
        return self._state

    @property
    def seniority(self) -> tuple[int, int]:
        """Sort key by class and arrival: smaller goes first and is preempted last."""
        return (-self.spec.priority, self.sequence)

    @property
    def expiry_s(self) -> float:
        """Time at which a waiting request is no longer worth running, engine clock."""
        spec = self.spec
        ttft = spec.ttft_deadline_s if self.first_token_s == NO_TIME else NO_TIME
        return min(spec.deadline_s, spec.time_limit_s, ttft)

    def apply(self, event: RequestEvent) -> None:
        """Change the state as the table allows, or raise IllegalTransition and change nothing."""
        self._state = transition(self._state, event)
