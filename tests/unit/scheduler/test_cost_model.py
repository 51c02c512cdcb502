from __future__ import annotations

import math

import pytest

from penstock.scheduler.cost_model import CostModel


def test_step_time_is_the_sum_of_its_parts() -> None:
    model = CostModel(step_s=1.0, prefill_token_s=0.1, decode_slot_s=0.01, context_token_s=0.001)

    step_s = model.step_time_s(num_prefill_tokens=5, num_decodes=3, num_context_tokens=7)

    assert step_s == pytest.approx(1.537)


@pytest.mark.parametrize("field", ["step_s", "prefill_token_s", "decode_slot_s", "context_token_s"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_rejects_an_invalid_coefficient(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be in 0..3600"):
        CostModel(**{field: value})
