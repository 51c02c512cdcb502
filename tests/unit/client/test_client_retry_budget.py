"""The retry budget that all calls of one client share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.retry_budget import RetryBudget


@given(
    share=st.floats(0.0, 1.0),
    reserve=st.integers(0, 20),
    turns=st.lists(st.booleans(), max_size=300),
)
def test_never_more_than_the_reserve_and_the_share(
    share: float, reserve: int, turns: list[bool]
) -> None:
    budget = RetryBudget(share=share, reserve=reserve)
    num_calls = num_retries = 0
    for is_call in turns:
        if is_call:
            budget.deposit()
            num_calls += 1
        else:
            num_retries += budget.withdraw()
    assert num_retries <= reserve + share * num_calls + 1e-6


def test_a_service_that_rejects_everything_is_offered_a_fifth_more() -> None:
    budget = RetryBudget(reserve=0)
    num_retries = 0
    for _ in range(1000):
        budget.deposit()
        while budget.withdraw():
            num_retries += 1
    assert num_retries == 200


def test_a_client_with_few_calls_may_retry_up_to_the_reserve() -> None:
    budget = RetryBudget()
    assert all(budget.withdraw() for _ in range(100))
    assert not budget.withdraw()


@pytest.mark.parametrize("share", [-0.1, math.nan, math.inf])
def test_a_share_must_be_a_number(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        RetryBudget(share=share)


def test_a_negative_reserve_is_rejected() -> None:
    with pytest.raises(ValueError, match="reserve"):
        RetryBudget(reserve=-1)
