"""The retry policy: whether and when to retry, given an error, the attempt, the time and a random
number.
"""

import math
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import NO_RETRY, PenstockError, RetryPolicy
from penstock.client.errors import Failure, error_of
from penstock.client.retry import Attempts, is_transient, retry_delay_s
from support.core import FakeClock

POLICY = RetryPolicy(
    max_attempts=4, initial_backoff_s=1.0, multiplier=2.0, max_backoff_s=3.0, pushback_jitter=0.5
)


def failure(
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
    reason: str = "",
    retry_after_s: float | None = None,
    is_retry_forbidden: bool = False,
) -> PenstockError:
    return error_of(
        Failure(
            code=code,
            message="m",
            reason=reason,
            retry_after_s=retry_after_s,
            is_retry_forbidden=is_retry_forbidden,
        )
    )


def delay(
    error: PenstockError,
    *,
    attempt: int = 1,
    has_output: bool = False,
    remaining_s: float = math.inf,
    jitter: float = 0.0,
) -> float | None:
    return retry_delay_s(
        POLICY,
        error,
        attempt=attempt,
        has_output=has_output,
        remaining_s=remaining_s,
        jitter=jitter,
    )


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not code.OK])
def test_only_unavailable_and_explained_exhaustion_pass(code: grpc.StatusCode) -> None:
    assert is_transient(failure(code)) == (code is grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), True),
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"), True),
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_STALLED", 1.0), False),
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "", 1.0), True),
        (failure(grpc.StatusCode.DEADLINE_EXCEEDED, "", 1.0), False),
        (failure(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", 1.0), False),
        (failure(is_retry_forbidden=True), False),
    ],
)
def test_which_errors_may_be_temporary(error: PenstockError, passes: bool) -> None:
    assert is_transient(error) == passes


def test_backoff_grows_to_its_bound_and_jitter_fills_its_upper_half() -> None:
    lows = [delay(failure(), attempt=attempt, jitter=0.0) for attempt in (1, 2, 3)]
    highs = [delay(failure(), attempt=attempt, jitter=0.999) for attempt in (1, 2, 3)]

    assert lows == [0.5, 1.0, 1.5]
    assert highs == pytest.approx([1.0, 2.0, 3.0], rel=1e-3)


def test_attempts_are_bounded() -> None:
    assert delay(failure(), attempt=3) is not None
    assert delay(failure(), attempt=4) is None


def test_never_after_output() -> None:
    assert delay(failure(), has_output=True) is None


def test_pushback_is_waited_for_in_full() -> None:
    error = failure(retry_after_s=2.0)

    assert delay(error, jitter=0.0) == 2.0
    assert delay(error, jitter=0.5) == 2.5


def test_a_wait_that_meets_the_deadline_is_not_begun() -> None:
    error = failure(retry_after_s=2.0)

    assert delay(error, remaining_s=2.0) is None
    assert delay(error, remaining_s=2.001) == 2.0


@given(
    attempt=st.integers(1, 2000),
    jitter=st.floats(0, 1, exclude_max=True),
    multiplier=st.floats(1, 1e6),
)
def test_backoff_is_always_finite_and_bounded(
    attempt: int, jitter: float, multiplier: float
) -> None:
    policy = RetryPolicy(max_attempts=10**6, multiplier=multiplier, max_backoff_s=3.0)

    delay_s = retry_delay_s(
        policy, failure(), attempt=attempt, has_output=False, remaining_s=math.inf, jitter=jitter
    )

    assert delay_s is not None
    assert 0 < delay_s <= 3.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("initial_backoff_s", -0.1),
        ("max_backoff_s", math.nan),
        ("pushback_jitter", math.inf),
        ("multiplier", 0.5),
    ],
)
def test_bad_policy_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        RetryPolicy(**{field: value})


def open_attempts(
    clock: FakeClock, deadline_s: float | None = None, policy: RetryPolicy = POLICY
) -> Attempts:
    return Attempts(policy, deadline_s=deadline_s, clock=clock, random=lambda: 0.0)


def test_each_wait_is_reported_and_the_last_failure_is_not() -> None:
    reported: list[tuple[PenstockError, float]] = []
    policy = RetryPolicy(
        max_attempts=2,
        pushback_jitter=0.0,
        on_retry=lambda error, wait_s: reported.append((error, wait_s)),
    )
    attempts = open_attempts(FakeClock(100.0), policy=policy)
    error = failure(retry_after_s=7.0)

    assert [attempts.delay_after(error), attempts.delay_after(error)] == [7.0, None]
    assert reported == [(error, 7.0)]


def test_all_attempts_share_one_deadline() -> None:
    clock = FakeClock(100.0)
    attempts = open_attempts(clock, deadline_s=5.0)

    assert attempts.timeout_s() == 5.0
    clock.now_s += 2.0
    assert attempts.timeout_s() == 3.0
    assert attempts.delay_after(failure(retry_after_s=3.5)) is None
    clock.now_s += 9.0
    assert attempts.timeout_s() == 0.0


def test_no_deadline_is_no_timeout() -> None:
    assert open_attempts(FakeClock(100.0)).timeout_s() is None


def test_attempts_count_failures() -> None:
    attempts = open_attempts(FakeClock(100.0))

    delays = [attempts.delay_after(failure()) for _ in range(5)]

    assert delays == [0.5, 1.0, 1.5, None, None]


def test_no_retry_means_none() -> None:
    assert open_attempts(FakeClock(100.0), policy=NO_RETRY).delay_after(failure()) is None


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.inf, math.nan])
def test_bad_deadline_is_rejected(deadline_s: float) -> None:
    with pytest.raises(ValueError, match=r"^deadline_s:"):
        open_attempts(FakeClock(100.0), deadline_s=deadline_s)


def test_a_reason_is_kept_where_the_server_is_gone_afterwards() -> None:
    attempts = Attempts(POLICY, deadline_s=None, clock=lambda: 0.0, random=lambda: 0.5)
    draining, gone = failure(reason="DRAINING"), failure()
    assert attempts.explain(gone) is gone
    attempts.delay_after(draining)
    attempts.delay_after(gone)
    assert attempts.explain(gone) is draining
    other = failure(grpc.StatusCode.INVALID_ARGUMENT)
    assert attempts.explain(other) is other, "an answer of another server counts"
