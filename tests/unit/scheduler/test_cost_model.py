"""The cost model: the formula, its inverse, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cost_model import CostModel

PRICES = st.floats(min_value=0.0, max_value=1.0)


def test_step_time_is_the_sum_of_its_parts() -> None:
    model = CostModel(step_s=1.0, prefill_token_s=0.1, decode_slot_s=0.01, context_token_s=0.001)

    step_s = model.step_time_s(num_prefill_tokens=5, num_decodes=3, num_context_tokens=7)

    assert step_s == pytest.approx(1.537)


@pytest.mark.parametrize("field", ["step_s", "prefill_token_s", "decode_slot_s", "context_token_s"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_refuses_a_price_that_is_none(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be finite"):
        CostModel(**{field: value})


@given(
    prices=st.tuples(PRICES, PRICES, PRICES, PRICES),
    budget_s=st.floats(min_value=0.0, max_value=10.0),
    num_decodes=st.integers(0, 64),
    num_context_tokens=st.integers(0, 4096),
    limit=st.integers(0, 8192),
)
def test_max_prefill_tokens_is_the_largest_that_fits(
    prices: tuple[float, float, float, float],
    budget_s: float,
    num_decodes: int,
    num_context_tokens: int,
    limit: int,
) -> None:
    step_s, prefill_token_s, decode_slot_s, context_token_s = prices
    model = CostModel(
        step_s=step_s,
        prefill_token_s=prefill_token_s,
        decode_slot_s=decode_slot_s,
        context_token_s=context_token_s,
    )

    def time_s(count: int) -> float:
        return model.step_time_s(
            num_prefill_tokens=count,
            num_decodes=num_decodes,
            num_context_tokens=num_context_tokens + count,
        )

    count = model.max_prefill_tokens(
        budget_s=budget_s,
        num_decodes=num_decodes,
        num_context_tokens=num_context_tokens,
        limit=limit,
    )

    slack_s = 1e-6
    assert 0 <= count <= limit
    assert count == 0 or time_s(count) <= budget_s + slack_s
    assert count == limit or time_s(count + 1) >= budget_s - slack_s
