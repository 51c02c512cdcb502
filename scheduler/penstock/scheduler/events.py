"""The events of a step.

Owns the events that the engine returns, and those not returned yet (`EventBuffer`). Tokens of all
requests are arrays; an event of one request (admission, preemption, end) is one small value. `Wait`
and `Stay` are named tuples: they are made for every request during a step, in a third of the time
of a frozen dataclass.
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
    """What a step lacked to admit a waiting request."""

    BLOCKS = 1
    """Blocks of the KV cache; or running requests lacked blocks and one was preempted."""
    SLOTS = 2
    """No slot is free, or the inter-token latency target allows no more running requests."""
    TOKEN_BUDGET = 3
    """Running and previously admitted requests took the token budget of the step."""
    FAIRNESS = 4
    """Other tenants are ahead by fair share, or the tenant is at its running limit."""


class Wait(NamedTuple):
    """One wait of a request in the queue, by reason.

    `blocks_s` .. `token_budget_s`: how long each `WaitReason` blocked the next request in the queue
    while it waited; `fairness_s`: the same for FAIRNESS, and how long later requests of another
    tenant were preferred (wait_clock.py defines it; that time is not part of the other reasons);
    `other_s`: nothing was lacking, no step was planned yet, or outputs after the first waited for
    their prompt. The parts add up to the queue time within nanoseconds. `num_passed_by`: how many
    later requests were admitted in that time.
    """

    blocks_s: float = 0.0
    slots_s: float = 0.0
    token_budget_s: float = 0.0
    fairness_s: float = 0.0
    other_s: float = 0.0
    num_passed_by: int = 0


class Stay(NamedTuple):
    """One residency of a request in the running batch.

    `num_chunks`: steps that computed its prompt (or recomputed it); `num_steps`: steps with tokens
    of it (engine iterations for a self-paced executor). `min_batch_size` and `max_batch_size`:
    requests with tokens in a step, over its steps. All 0 for a request that was preempted before it
    had tokens.
    """

    num_chunks: int = 0
    num_steps: int = 0
    min_batch_size: int = 0
    max_batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The request is in the queue.

    `num_ahead`: requests ahead of it, if nothing changes. `estimated_queue_s`: the estimated queue
    time from `at_s` on, None without an estimate.
    """

    key: int
    at_s: float
    num_ahead: int
    estimated_queue_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request got a slot. `num_cached_tokens` of its prompt need not be computed."""

    key: int
    at_s: float
    num_cached_tokens: int
    num_preemptions: int
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The request lost its blocks and waits again; its tokens are kept and recomputed later."""

    key: int
    at_s: float
    stay: Stay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """The executor found prompt tokens in its cache; their number replaces the predicted one."""

    key: int
    at_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request is COMPLETED. `stop_id` is the stop token that ended it, -1 for none.

    `wait` if it was waiting, `stay` if it was running.
    """

    key: int
    at_s: float
    reason: FinishReason
    stop_id: int = -1
    wait: Wait | None = None
    stay: Stay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request is ERROR, or was refused.

    `request_id`, `trace_id` and `detail` are set if the executor failed it, for the server log
    only. For a request refused or dropped from the queue: `estimate_s`, seconds from its arrival to
    its predicted end (or first token), `deadline_s`, seconds from its arrival to that deadline, and
    `retry_after_s`, seconds from now until a retry may succeed, infinite if an idle machine would
    be too slow; None without a deadline or an estimate. `chance`: the probability that the whole
    answer would have met its deadline, if it was too small; such a request may also have run.
    `breach`: for TENANT_OVER_QUOTA and TOO_MANY_OUTPUTS, the exceeded limit. `wait` if it was
    waiting, `stay` if it was running.
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
    stay: Stay | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEvents:
    """All events of one step, in order of effect: `changes`, tokens, `ends`.

    `keys` int64 [m] and `tokens` int32 [m]: new tokens; a key may occur several times, in order.
    `logprobs` aligned with `tokens`, None when none were requested. `prompt_logprobs`: (key, first
    position, logprobs), positions as in `StepResult`. A stop token that ends a request is among the
    tokens.
    """

    step: int
    at_s: float
    keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, int, TokenLogprobs], ...] = ()
    changes: tuple[Queued | Admitted | Preempted | PrefixFound, ...] = ()
    ends: tuple[Finished | Failed, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True when there are no events."""
        return not (len(self.keys) or self.changes or self.ends or self.prompt_logprobs)


class EventBuffer:
    """The events since the last `take`; tokens as one entry per group, in order."""

    def __init__(self) -> None:
        self.changes: list[Queued | Admitted | Preempted | PrefixFound] = []
        self.ends: list[Finished | Failed] = []
        self.prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = []
        self._keys: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._logprobs: list[TokenLogprobs] = []

    def add_tokens(
        self, keys: NDArray[np.int64], tokens: NDArray[np.int32], logprobs: TokenLogprobs | None
    ) -> None:
        """Add one token for each of `keys` [m]."""
        self._keys.append(keys)
        self._tokens.append(tokens)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def take(self, step: int, now: float) -> StepEvents:
        """Return all events since the last call."""
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
