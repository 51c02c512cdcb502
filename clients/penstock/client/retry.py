"""Decides whether, and after what delay, a failed call is retried.

Contains the retry policy, and counts the attempts of one logical call. Does no I/O and does not
sleep: the clock and the random numbers are arguments.

A call is retried only if all of these conditions hold: none of its output was delivered, or it is a
Resume call, which continues after the delivered output; the status is UNAVAILABLE, or
RESOURCE_EXHAUSTED for a transient reason (see `is_transient`); the server did not forbid retries;
attempts are left, and retries in the client's budget (retry_budget.py); and the wait ends before
the call's deadline. `DeadlineUnreachable` is raised immediately even if it has a retry time,
because the deadline would pass before that time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import grpc

from penstock.client.argument_types import require_number
from penstock.client.errors import PenstockError, QueueFull, QuotaExceeded, ReaderStalled
from penstock.client.retry_budget import RetryBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When failed calls are retried, as in gRFC A6 without hedging.

    The wait before attempt k+1 is random, from half to all of `min(initial_backoff_s *
    multiplier**(k-1), max_backoff_s)`. A retry time from the server replaces it, plus a random part
    of up to `pushback_jitter` of that time, so that rejected clients do not retry together. Raises
    ValueError or TypeError, naming the field, if one is invalid.

    Attributes:
        max_attempts: Maximum number of attempts of one call, including the first.
        initial_backoff_s: Maximum wait before the second attempt.
        multiplier: Growth of the wait with each attempt.
        max_backoff_s: Maximum wait, unless the server requests a longer one.
        pushback_jitter: Random part added to the server's retry time, as a fraction.
        on_retry: Called before each wait with the error and the wait in seconds.
    """

    max_attempts: int = 4
    initial_backoff_s: float = 0.2
    multiplier: float = 2.0
    max_backoff_s: float = 5.0
    pushback_jitter: float = 0.2
    on_retry: Callable[[PenstockError, float], None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError, naming the field, if one is invalid."""
        require_number(self.max_attempts, "max_attempts", Integral, at_least=1)
        for name in ("initial_backoff_s", "max_backoff_s", "pushback_jitter"):
            require_number(getattr(self, name), name, Real, at_least=0)
        require_number(self.multiplier, "multiplier", Real, at_least=1)


NO_RETRY = RetryPolicy(max_attempts=1)
"""A policy without retries: the first failure is raised."""


def is_transient(error: PenstockError) -> bool:
    """Return True if the same call may succeed soon, because the failure is transient.

    UNAVAILABLE is transient. RESOURCE_EXHAUSTED is transient if its reason is a full queue or a
    quota, or if it has a retry time; otherwise it usually means a message over a size limit. An
    error is permanent if the server forbade retries or ended a stream that was not read.
    """
    if error.failure.is_retry_forbidden or isinstance(error, ReaderStalled):
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

    `attempt` is the number of the failed attempt, from 1. `remaining_s` is the time to the call's
    deadline, infinity for none. `jitter` is uniformly distributed in [0, 1).
    """
    if has_output or attempt >= policy.max_attempts or not is_transient(error):
        return None
    if error.retry_after_s is not None:
        delay_s = error.retry_after_s * (1.0 + policy.pushback_jitter * jitter)
    else:
        # Computed as a bounded power of two, because `multiplier ** attempt` overflows.
        growth = math.exp2(min((attempt - 1) * math.log2(policy.multiplier), 1000.0))
        backoff_s = min(policy.initial_backoff_s * growth, policy.max_backoff_s)
        delay_s = backoff_s * (0.5 + 0.5 * jitter)
    return delay_s if delay_s < remaining_s else None


class Attempts:
    """Counts the attempts of one logical call, and decides whether and when there is another."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        deadline_s: float | None,
        clock: Callable[[], float],
        random: Callable[[], float],
        budget: RetryBudget | None = None,
    ) -> None:
        """Begin a logical call. `deadline_s` is the time for all its attempts together, in seconds
        from now; None for no deadline.

        `budget` is the retry budget, to which this call adds its share; None for no budget. Raises
        ValueError or TypeError for an invalid `deadline_s`.
        """
        if deadline_s is not None:
            require_number(deadline_s, "deadline_s", Real, above=0)
        self._policy = policy
        self._clock = clock
        self._random = random
        self._expires_s = math.inf if deadline_s is None else clock() + deadline_s
        self._num_failed = 0
        self._last_with_reason: PenstockError | None = None
        self._budget = budget
        if budget is not None:
            budget.deposit()

    def timeout_s(self) -> float | None:
        """Return the gRPC timeout of the next attempt, in seconds; None without a deadline."""
        remaining_s = self._remaining_s()
        return None if math.isinf(remaining_s) else remaining_s

    def delay_after(self, error: PenstockError, *, has_output: bool = False) -> float | None:
        """Count a failed attempt; return the seconds to wait before the next attempt, or None if
        there is no further attempt."""
        self._num_failed += 1
        if error.reason:
            self._last_with_reason = error
        delay_s = retry_delay_s(
            self._policy,
            error,
            attempt=self._num_failed,
            has_output=has_output,
            remaining_s=self._remaining_s(),
            jitter=self._random(),
        )
        if delay_s is None or not (self._budget is None or self._budget.withdraw()):
            return None
        if self._policy.on_retry is not None:
            self._policy.on_retry(error, delay_s)
        return delay_s

    def explain(self, error: PenstockError) -> PenstockError:
        """Return the error to raise: `error`, or the latest error with a reason if `error` is
        UNAVAILABLE without a reason.

        For example, a draining server rejects an attempt with a reason; later attempts get no
        response, because the server has stopped.
        """
        is_bare = error.code is grpc.StatusCode.UNAVAILABLE and not error.reason
        return self._last_with_reason if is_bare and self._last_with_reason is not None else error

    def _remaining_s(self) -> float:
        return max(0.0, self._expires_s - self._clock())
