"""Invariants of the step fit, for any steps, any prior cost coefficients and any measured times."""

from __future__ import annotations

import math
from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.step_fit import StepFit

models = st.builds(
    CostModel,
    step_s=st.floats(1e-4, 1.0),
    prefill_token_s=st.floats(0.0, 1e-3, allow_subnormal=False),
    decode_slot_s=st.floats(0.0, 1e-2, allow_subnormal=False),
    context_token_s=st.floats(0.0, 1e-5, allow_subnormal=False),
)
steps = st.tuples(
    st.integers(0, 8192),
    st.integers(0, 1024),
    st.integers(0, 10**6),
    st.floats(0.0, 1e9, allow_subnormal=False),
)


@given(prior=models, observed=st.lists(steps, max_size=120))
def test_coefficients_stay_finite_and_not_negative(
    prior: CostModel, observed: list[tuple[int, int, int, float]]
) -> None:
    fit = StepFit(prior)
    for prefill, decodes, context, measured_s in observed:
        fit.observe(
            measured_s,
            num_prefill_tokens=prefill,
            num_decodes=decodes,
            num_context_tokens=context,
        )

        # A CostModel rejects any other coefficient.
        assert astuple(fit.model) == (
            fit.step_s,
            fit.prefill_token_s,
            fit.decode_slot_s,
            fit.context_token_s,
        )
        assert math.isfinite(fit.error_p90)
        assert fit.error_p90 >= 0.0
    assert fit.num_steps == len(observed)


factors = st.floats(0.1, 10.0)


@given(
    prior=st.builds(
        CostModel,
        step_s=st.floats(1e-4, 1.0),
        prefill_token_s=st.floats(1e-6, 1e-3),
        decode_slot_s=st.floats(1e-6, 1e-2),
        context_token_s=st.floats(1e-9, 1e-6),
    ),
    off_by=st.tuples(factors, factors, factors, factors),
    seed=st.integers(0, 1000),
)
def test_a_machine_that_is_a_line_is_learnt_and_trusted(
    prior: CostModel, off_by: tuple[float, float, float, float], seed: int
) -> None:
    truth = CostModel(
        step_s=prior.step_s * off_by[0],
        prefill_token_s=prior.prefill_token_s * off_by[1],
        decode_slot_s=prior.decode_slot_s * off_by[2],
        context_token_s=prior.context_token_s * off_by[3],
    )
    fit = StepFit(prior)
    for index in range(600):
        # Varied steps without a random generator.
        mix = (index + seed) * 7919
        step = {
            "num_prefill_tokens": (mix % 5 // 3) * (mix % 1021),
            "num_decodes": 1 + mix % 127,
            "num_context_tokens": (1 + mix % 127) * (100 + mix % 911),
        }
        fit.observe(truth.step_time_s(**step), **step)

    assert fit.is_trusted
    # The errors of the first steps, predicted by the prior, still have some weight.
    assert fit.error_p90 < 0.2


@given(measured_s=st.floats(0.011, 1e6))
def test_one_slow_step_raises_its_own_prediction_by_a_bounded_share(measured_s: float) -> None:
    fit = StepFit()
    step = {"num_prefill_tokens": 256, "num_decodes": 32, "num_context_tokens": 10_000}
    before_s = fit.step_time_s(**step)

    fit.observe(measured_s, **step)

    # 2.5 standard deviations of a window that holds errors of 0.225.
    bound = 2.5 * 1.4826 * 0.225
    assert abs(fit.step_time_s(**step) / before_s - 1.0) <= bound * 1.001
