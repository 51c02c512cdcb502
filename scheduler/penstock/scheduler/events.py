"""Defines the events that a step returns, and buffers them until they are returned.

Tokens of all requests are stored in arrays; an admission, a preemption or an end is one small
object. `Wait` and `Residency` are named tuples because every admission, preemption and end creates
one, and a frozen dataclass takes longer to create.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.quotas import QuotaBreach
from penstock.scheduler.request import FailureReason, FinishReason

_Scalar = TypeVar("_Scalar", bound=np.generic)

NO_KEYS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
NO_TOKENS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class WaitReason(enum.IntEnum):
    """Why a step did not admit the first request of the queue."""

    BLOCKS = 1
    """Too few KV cache blocks are free, or the step preempted a running request."""
    SLOTS = 2
    """No slot is free, or the inter-token latency target allows no more running requests."""
    TOKEN_BUDGET = 3
    """The token budget of the step is used up by running and previously admitted requests."""
    FAIRNESS = 4
    """Other tenants are ahead by fair share, or the tenant is at its running limit."""


class Wait(NamedTuple):
    """Queue time of a request by reason, seconds, from joining the queue to leaving it.

    The parts add up to the queue time within nanoseconds. `blocks_s` .. `token_budget_s`: how long
    each `WaitReason` blocked the head of the queue while this request waited.

    Attributes:
        fairness_s: How long FAIRNESS blocked the head of the queue, plus the time in which later
            requests of another tenant were preferred (see wait_clock.py); that time is not counted
            under the other reasons.
        other_s: The time in which no resource was short, no step was planned yet, or further
            outputs of a request waited for the shared prompt.
        num_passed_by: Number of later requests that were admitted while this request waited.
    """

    blocks_s: float = 0.0
    slots_s: float = 0.0
    token_budget_s: float = 0.0
    fairness_s: float = 0.0
    other_s: float = 0.0
    num_passed_by: int = 0


class Residency(NamedTuple):
    """Statistics of one residency of a request in the running batch: from admission to preemption
    or end.

    All fields are 0 for a request that left the batch before its first step.

    Attributes:
        num_chunks: Number of steps that computed or recomputed its prompt.
        num_steps: Number of steps that it took part in (engine iterations for a self-paced
            executor, see `ExecutorInfo`).
        min_batch_size, max_batch_size: The smallest and largest number of requests in one of these
            steps.
    """

    num_chunks: int = 0
    num_steps: int = 0
    min_batch_size: int = 0
    max_batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The request joined the queue.

    `num_ahead`: current number of requests ahead of it. `estimated_queue_s`: the estimated queue
    time from `at_s` on, None without an estimate. `waits_for`: why the last step admitted no more
    requests, None if it admitted all.
    """

    key: int
    at_s: float
    num_ahead: int
    estimated_queue_s: float | None
    waits_for: WaitReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request got a slot. `num_cached_tokens` of its tokens are cached and are not computed.
    `wait`: its queue time since it was submitted or last preempted.
    """

    key: int
    at_s: float
    num_cached_tokens: int
    num_preemptions: int
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The request lost its blocks and waits again; its tokens are kept, their keys and values are
    recomputed later. `residency`: the residency that ends.
    """

    key: int
    at_s: float
    residency: Residency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """The executor found prompt tokens in its own cache. `num_cached_tokens` replaces
    `Admitted.num_cached_tokens`, a prediction.
    """

    key: int
    at_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The request is COMPLETED. `stop_id` is the stop token that ended it, -1 for none.

    `wait`: its last wait in the queue, if it was waiting. `residency`: its last residency in the
    batch, if it was running.
    """

    key: int
    at_s: float
    reason: FinishReason
    stop_id: int = -1
    wait: Wait | None = None
    residency: Residency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended in ERROR, or was rejected.

    Attributes:
        request_id, trace_id, detail: The request's ids and the executor's error, for the server log
            only; empty unless the executor failed the request.
        estimate_s: If the request would miss a deadline, seconds from its arrival to its predicted
            end (or first token). If it exceeds a limit of the queue or of its tenant, seconds from
            `at_s` to its predicted first token. None without an estimate.
        deadline_s: Seconds from its arrival to the deadline that it would miss; None if no missed
            deadline was predicted.
        retry_after_s: Seconds from `at_s` until a retry may succeed; infinite if it cannot succeed,
            for example because even an idle machine would be too slow; None if unknown.
        chance: The probability that the complete output would have met its deadline, if that was
            too small; such a request may also have run.
        breach: The tenant's limit that was exceeded, for TENANT_OVER_QUOTA and TOO_MANY_OUTPUTS;
            None if the queue itself is too small.
        wait: Its last wait in the queue, if it was waiting.
        residency: Its last residency in the batch, if it was running.
    """

    key: int
    at_s: float
    reason: FailureReason
    request_id: str = ""
    trace_id: bytes = b""
    detail: str = ""
    estimate_s: float | None = None
    deadline_s: float | None = None
    chance: float | None = None
    retry_after_s: float | None = None
    breach: QuotaBreach | None = None
    wait: Wait | None = None
    residency: Residency | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEvents:
    """All events since the previous step, to be applied in this order: `changes`, tokens, `ends`.

    `keys` int64 [m] and `tokens` int32 [m]: new tokens; a key may occur several times, in order.
    `logprobs`: aligned with `tokens`, None if none were requested. `prompt_logprobs`: (key, first
    position, logprobs), positions as in `StepResult`. `tokens` includes the stop token that ended a
    request.
    """

    step: int
    at_s: float
    keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, int, TokenLogprobs], ...] = ()
    changes: tuple[Queued | Admitted | Preempted | PrefixFound, ...] = ()
    ends: tuple[Completed | Failed, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there are no events."""
        return not (len(self.keys) or self.changes or self.ends or self.prompt_logprobs)


class EventBuffer:
    """Collects events until `take`. The tokens of one `add_tokens` call are stored as one entry;
    each kind of event keeps its order.
    """

    def __init__(self) -> None:
        self.changes: list[Queued | Admitted | Preempted | PrefixFound] = []
        self.ends: list[Completed | Failed] = []
        self.prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = []
        self._keys: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._logprobs: list[TokenLogprobs] = []

    def add_tokens(
        self, keys: NDArray[np.int64], tokens: NDArray[np.int32], logprobs: TokenLogprobs | None
    ) -> None:
        """Add one token for each of `keys` int64 [m]; `tokens` and `logprobs` are in the same
        order.
        """
        self._keys.append(keys)
        self._tokens.append(tokens)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def take(self, step: int, now: float) -> StepEvents:
        """Remove and return all collected events, as the events of `step` at time `now`."""
        events = StepEvents(
            step=step,
            at_s=now,
            keys=_joined(self._keys, NO_KEYS),
            tokens=_joined(self._tokens, NO_TOKENS),
            logprobs=_joined_logprobs(self._logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            changes=tuple(self.changes),
            ends=tuple(self.ends),
        )
        self.changes.clear()
        self.ends.clear()
        self.prompt_logprobs.clear()
        for parts in (self._keys, self._tokens, self._logprobs):
            parts.clear()
        return events


def _joined(parts: list[NDArray[_Scalar]], empty: NDArray[_Scalar]) -> NDArray[_Scalar]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty


def _joined_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return TokenLogprobs(
        chosen=np.concatenate([part.chosen for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
