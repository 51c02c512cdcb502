"""When and after how long a failed call is retried.

Owns the policy and counts the attempts of one logical call. Does no I/O and does not sleep: the
clock and the random numbers are arguments.

A call is retried only if all of this holds: no output of it was delivered; the status is
UNAVAILABLE, or RESOURCE_EXHAUSTED for a transient reason (see `is_passing`); the server did not
refuse retries; attempts are left, and retries in the client's budget (retry_budget.py); and the
wait ends before the call's deadline. A deadline that cannot be met is raised at once, although its
status has a retry time: the deadline would have passed by then.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from penstock.client.errors import PenstockError, QueueFull, QuotaExceeded, ReaderStalled
from penstock.client.retry_budget import RetryBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When failed calls are retried, after gRFC A6 without hedging.

    The wait before attempt k+1 is random, from half to all of `min(initial_backoff_s *
    multiplier**(k-1), max_backoff_s)`. A retry time of the server replaces it; up to
    `pushback_jitter` of it is added, so that rejected clients do not return together. Raises
    ValueError, which names the field, for a value out of range.

    Attributes:
        max_attempts: Attempts of one call, the first included.
        initial_backoff_s: Longest wait before the second attempt.
        multiplier: Growth of the wait with each attempt.
        max_backoff_s: Longest wait, unless the server requests a longer one.
        pushback_jitter: Random part added to the server's retry time.
    """

    max_attempts: int = 4
    initial_backoff_s: float = 0.2
    multiplier: float = 2.0
    max_backoff_s: float = 5.0
    pushback_jitter: float = 0.2

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: must be at least 1, not {self.max_attempts}")
        for name in ("initial_backoff_s", "max_backoff_s", "pushback_jitter"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be finite and not negative, not {value}")
        if not (math.isfinite(self.multiplier) and self.multiplier >= 1):
            raise ValueError(f"multiplier: must be finite and at least 1, not {self.multiplier}")


NO_RETRY = RetryPolicy(max_attempts=1)
"""The first failure is raised."""


def is_passing(error: PenstockError) -> bool:
    """Return whether the same call may succeed a little later.

    RESOURCE_EXHAUSTED counts if the server named its queue or a quota as the reason, or gave a
    retry time. Without either it usually means a message over a size limit, which is permanent.
    """
    if error.failure.is_retry_refused or isinstance(error, ReaderStalled):
        return False
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return isinstance(error, QueueFull | QuotaExceeded) or error.retry_after_s is not None
    return error.code is grpc.StatusCode.UNAVAILABLE


def retry_delay_s(
    policy: RetryPolicy,
    error: PenstockError,
    *,
    attempt: int,
    has_output: bool,
    remaining_s: float,
    jitter: float,
) -> float | None:
    """Return the seconds to wait before the next attempt; None to raise the error instead.

    `attempt` counts from 1 and is the one that failed. `remaining_s` is the time to the call's
    deadline, infinity for none. `jitter` is uniformly distributed in [0, 1).
    """
    if has_output or attempt >= policy.max_attempts or not is_passing(error):
        return None
    if error.retry_after_s is not None:
        delay_s = error.retry_after_s * (1.0 + policy.pushback_jitter * jitter)
    else:
        # As a bounded power of two, because `multiplier ** attempt` overflows.
        growth = math.exp2(min((attempt - 1) * math.log2(policy.multiplier), 1000.0))
        backoff_s = min(policy.initial_backoff_s * growth, policy.max_backoff_s)
        delay_s = backoff_s * (0.5 + 0.5 * jitter)
    return delay_s if delay_s < remaining_s else None


class Attempts:
    """The attempts of one logical call: the remaining time, and whether to try again."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        deadline_s: float | None,
        clock: Callable[[], float],
        random: Callable[[], float],
        budget: RetryBudget | None = None,
    ) -> None:
        """`deadline_s`: seconds from now for all attempts together; None for no deadline.

        `budget`: the retry budget, None for no budget.
        """
        if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ValueError(f"deadline_s: must be finite and positive, not {deadline_s}")
        self._policy = policy
        self._clock = clock
        self._random = random
        self._expires_s = math.inf if deadline_s is None else clock() + deadline_s
        self._num_failed = 0
        self._reasoned: PenstockError | None = None
        self._budget = budget
        if budget is not None:
            budget.pay_in()

    def timeout_s(self) -> float | None:
        """Return the gRPC timeout of the next attempt, in seconds."""
        remaining_s = self._remaining_s()
        return None if math.isinf(remaining_s) else remaining_s

    def delay_after(self, error: PenstockError, *, has_output: bool = False) -> float | None:
        """Count a failed attempt; return the seconds to wait before the next, None if there is
        none.
        """
        self._num_failed += 1
        if error.reason:
            self._reasoned = error
        delay_s = retry_delay_s(
            self._policy,
            error,
            attempt=self._num_failed,
            has_output=has_output,
            remaining_s=self._remaining_s(),
            jitter=self._random(),
        )
        if delay_s is None or self._budget is None or self._budget.take():
            return delay_s
        return None

    def explain(self, error: PenstockError) -> PenstockError:
        """Return the error to raise: the server's earlier reason if the connection was lost after
        it.

        A draining server stops soon, so later attempts get no response.
        """
        is_bare = error.code is grpc.StatusCode.UNAVAILABLE and not error.reason
        return self._reasoned if is_bare and self._reasoned is not None else error

    def _remaining_s(self) -> float:
        return max(0.0, self._expires_s - self._clock())
