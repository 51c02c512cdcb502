"""The fit of step times: what it learns, what it ignores, and when it is trusted."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest

from penstock.scheduler.cost_model import UNKNOWN_ERROR, CostModel
from penstock.scheduler.step_fit import StepFit

TRUTH = CostModel(step_s=0.012, prefill_token_s=1.5e-4, decode_slot_s=2e-4, context_token_s=1.5e-7)
Features = tuple[int, int, int]


def mixed_steps(num_steps: int, seed: int = 0) -> list[Features]:
    """Return random steps as (prefill tokens, decodes, context tokens). The number of decodes
    drifts, and three of five steps prefill on average.
    """
    random = np.random.default_rng(seed)
    decodes = 32
    steps: list[Features] = []
    for _ in range(num_steps):
        decodes = int(np.clip(decodes + random.integers(-3, 4), 1, 128))
        prefill = int(random.choice([0, 0, 64, 256, 512]))
        steps.append((prefill, decodes, decodes * int(random.integers(100, 900)) + prefill))
    return steps


def predict(coefficients: StepFit | CostModel, step: Features) -> float:
    prefill, decodes, context = step
    return coefficients.step_time_s(
        num_prefill_tokens=prefill, num_decodes=decodes, num_context_tokens=context
    )


def feed(fit: StepFit, step: Features, measured_s: float) -> None:
    prefill, decodes, context = step
    fit.observe(
        measured_s,
        num_prefill_tokens=prefill,
        num_decodes=decodes,
        num_context_tokens=context,
    )


def learn(
    fit: StepFit, truth: CostModel, steps: list[Features], noise: float = 0.0, seed: int = 1
) -> None:
    random = np.random.default_rng(seed)
    for step in steps:
        feed(fit, step, predict(truth, step) * float(random.lognormal(0.0, noise)))


def worst_error(fit: StepFit, truth: CostModel, steps: list[Features]) -> float:
    return max(abs(predict(fit, step) / predict(truth, step) - 1.0) for step in steps)


def test_starts_from_its_prior_without_trust() -> None:
    fit = StepFit(TRUTH)

    assert fit.model == TRUTH
    assert not fit.is_trusted


def test_a_measured_prior_can_be_trusted_at_once() -> None:
    assert StepFit(TRUTH, min_steps=0).is_trusted


def test_learns_the_coefficients_of_a_quiet_machine() -> None:
    fit = StepFit()

    learn(fit, TRUTH, mixed_steps(3000))

    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.02
    assert fit.prefill_token_s == pytest.approx(TRUTH.prefill_token_s, rel=0.02)
    assert fit.step_s == pytest.approx(TRUTH.step_s, rel=0.05)
    assert fit.error_p90 < 0.02
    assert fit.is_trusted


def test_learns_through_noise() -> None:
    fit = StepFit()

    learn(fit, TRUTH, mixed_steps(3000), noise=0.1)

    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.07
    # The 90th percentile of |N(0, 0.1)|.
    assert fit.error_p90 == pytest.approx(0.164, rel=0.4)


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_leaves_a_prior_of_another_machine_within_a_hundred_steps(factor: float) -> None:
    prior = CostModel(
        **{
            name: value * factor
            for name, value in zip(
                ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s"),
                astuple(TRUTH),
                strict=True,
            )
        }
    )
    fit = StepFit(prior)

    learn(fit, TRUTH, mixed_steps(100), noise=0.05)

    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.2
    assert fit.is_trusted


def test_a_compilation_in_the_first_step_is_soon_forgotten() -> None:
    fit = StepFit()
    steps = mixed_steps(60)
    feed(fit, steps[0], 30.0)

    learn(fit, TRUTH, steps, noise=0.05)

    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.2


def test_rare_pauses_have_no_more_influence_than_slow_steps() -> None:
    fit, twin = StepFit(), StepFit()
    random = np.random.default_rng(3)
    for index, step in enumerate(mixed_steps(2000)):
        measured_s = predict(TRUTH, step) * float(random.lognormal(0.0, 0.05))
        feed(twin, step, measured_s)
        feed(fit, step, measured_s + (5.0 if index % 20 == 0 else 0.0))

    assert worst_error(twin, TRUTH, mixed_steps(200, seed=9)) < 0.04
    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.06
    assert fit.is_trusted


def test_one_pause_of_a_minute_hardly_changes_a_learnt_fit() -> None:
    fit = StepFit()
    steps = mixed_steps(1000)
    learn(fit, TRUTH, steps, noise=0.03)
    before = [predict(fit, step) for step in steps[:100]]

    feed(fit, steps[0], 60.0)

    after = [predict(fit, step) for step in steps[:100]]
    assert after == pytest.approx(before, rel=0.01)


def test_a_coefficient_without_observations_keeps_its_prior() -> None:
    prior = CostModel(step_s=0.01, prefill_token_s=3e-5, decode_slot_s=1e-4, context_token_s=1e-7)
    fit = StepFit(prior)

    for index in range(3000):
        decodes = 1 + index % 64
        step = (0, decodes, decodes * 300)
        feed(fit, step, 0.02 + 3e-4 * decodes)

    assert fit.prefill_token_s == pytest.approx(prior.prefill_token_s)
    assert predict(fit, (0, 32, 32 * 300)) == pytest.approx(0.02 + 3e-4 * 32, rel=0.01)


def test_a_learnt_coefficient_is_kept_without_new_observations() -> None:
    fit = StepFit()
    learn(fit, TRUTH, mixed_steps(2000))
    learnt = fit.prefill_token_s

    for _ in range(5_000):
        feed(fit, (0, 16, 16 * 300), predict(TRUTH, (0, 16, 16 * 300)))

    assert fit.prefill_token_s == pytest.approx(learnt, rel=0.01)
    assert worst_error(fit, TRUTH, mixed_steps(200, seed=9)) < 0.03


def test_steps_of_one_kind_keep_the_coefficients_stable() -> None:
    fit = StepFit()

    for _ in range(10_000):
        feed(fit, (0, 1, 500), predict(TRUTH, (0, 1, 500)))
    feed(fit, (512, 1, 1012), 2.0 * predict(fit, (512, 1, 1012)))

    assert all(math.isfinite(coefficient) for coefficient in astuple(fit.model))
    assert predict(fit, (0, 1, 500)) == pytest.approx(predict(TRUTH, (0, 1, 500)), rel=0.01)


def test_follows_a_machine_that_became_twice_as_slow() -> None:
    slow = CostModel(step_s=0.024, prefill_token_s=3e-4, decode_slot_s=4e-4, context_token_s=3e-7)
    fit = StepFit()
    learn(fit, TRUTH, mixed_steps(1000), noise=0.05)

    was_trusted: list[bool] = []
    for step in mixed_steps(300, seed=5):
        feed(fit, step, predict(slow, step))
        was_trusted.append(fit.is_trusted)

    assert not all(was_trusted), "nobody may rely on it while it is off by half"
    assert was_trusted[-1]
    assert worst_error(fit, slow, mixed_steps(200, seed=9)) < 0.1


def test_follows_a_coefficient_that_drifts() -> None:
    fit = StepFit()
    steps = mixed_steps(10_000)

    for index, step in enumerate(steps):
        truth = CostModel(
            step_s=0.012,
            prefill_token_s=1.5e-4 * (1.0 + index / 10_000),
            decode_slot_s=2e-4,
            context_token_s=1.5e-7,
        )
        feed(fit, step, predict(truth, step))

    assert fit.prefill_token_s == pytest.approx(3e-4, rel=0.1)


def test_coefficients_stay_above_zero_under_noise() -> None:
    truth = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=0.0, context_token_s=0.0)
    fit = StepFit()

    random = np.random.default_rng(7)
    for step in mixed_steps(1500):
        feed(fit, step, predict(truth, step) * float(random.lognormal(0.0, 0.1)))
        assert min(astuple(fit.model)) >= 0.0

    assert worst_error(fit, truth, mixed_steps(200, seed=9)) < 0.1


def test_a_deviation_of_one_kind_of_step_does_not_change_the_others() -> None:
    fit = StepFit(min_steps=16)
    truth = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=1e-4, context_token_s=0.0)
    learn(fit, truth, mixed_steps(400))
    decode = (0, 32, 9600)
    before_s = predict(fit, decode)
    # Suddenly prompts cost three times as much, and decodes the same as before.
    for index in range(24):
        prefill = (512, 32, 9600 + 512)
        feed(fit, prefill, 3.0 * predict(truth, prefill))
        if index % 3 == 0:
            feed(fit, decode, predict(truth, decode))
    assert predict(fit, decode) == pytest.approx(before_s, rel=0.25)
    assert fit.decode_error != UNKNOWN_ERROR


def test_pauses_are_in_the_bias_of_the_errors() -> None:
    fit, random = StepFit(), np.random.default_rng(4)
    for step in mixed_steps(2000):
        feed(fit, step, predict(TRUTH, step) * (2.0 if random.random() < 0.12 else 1.0))
    for error in (fit.prefill_error, fit.decode_error):
        assert error.bias == pytest.approx(0.12, abs=0.1)


def test_an_error_is_known_once_steps_of_its_kind_were_seen() -> None:
    fit = StepFit(min_steps=32)
    for _ in range(40):
        feed(fit, (0, 8, 800), predict(TRUTH, (0, 8, 800)))
    assert fit.prefill_error == UNKNOWN_ERROR
    for _ in range(20):
        feed(fit, (64, 8, 864), predict(TRUTH, (64, 8, 864)))
    assert fit.prefill_error != UNKNOWN_ERROR


@pytest.mark.parametrize("noise", [(1.0,), (1.0, 1.5, 2.0), (*[1.0] * 30, 30.0)])
@pytest.mark.parametrize(("step_s", "token_s"), [(3e-4, 2e-7), (4e-3, 2e-5)])
def test_the_fit_has_a_solution_with_only_prompts(
    step_s: float, token_s: float, noise: tuple[float, ...]
) -> None:
    random = np.random.default_rng(3)
    fit = StepFit()
    sizes = 40 * random.choice([1, 1, 2, 2, 3, 5, 8, 13], 4_000)
    factors = random.choice(noise, 4_000)
    for num_tokens, factor in zip(sizes.tolist(), factors.tolist(), strict=True):
        # Prefill tokens and context are equal and nothing decodes: one coefficient for both.
        feed(fit, (num_tokens, 0, num_tokens), (step_s + num_tokens * token_s) * factor)
        assert min(astuple(fit.model)) >= 0.0
    predicted_s = predict(fit, (120, 0, 120))
    assert predicted_s == pytest.approx((step_s + 120 * token_s) * np.median(noise), rel=0.5)


def test_step_times_that_no_linear_model_fits_are_not_trusted() -> None:
    fit = StepFit()
    random = np.random.default_rng(2)

    for step in mixed_steps(500):
        feed(fit, step, predict(TRUTH, step) * float(random.choice([0.1, 1.0, 8.0])))

    assert not fit.is_trusted


def test_the_same_steps_give_the_same_coefficients() -> None:
    fits = [StepFit(), StepFit()]
    for fit in fits:
        learn(fit, TRUTH, mixed_steps(500), noise=0.1)

    assert fits[0].model == fits[1].model


def test_steps_of_zero_duration_cost_nothing() -> None:
    fit = StepFit()

    for step in mixed_steps(300):
        feed(fit, step, 0.0)

    assert predict(fit, (512, 64, 64 * 500)) < 1e-4


def test_empty_steps_determine_the_cost_of_a_step() -> None:
    fit = StepFit(CostModel(step_s=0.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0))

    for _ in range(200):
        feed(fit, (0, 0, 0), 0.02)

    assert fit.step_s == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("measured_s", [-1.0, math.nan, math.inf])
def test_an_invalid_time_is_rejected(measured_s: float) -> None:
    with pytest.raises(ValueError, match="measured_s must be finite"):
        feed(StepFit(), (0, 1, 1), measured_s)


@pytest.mark.parametrize("step", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_rejects_counts_below_zero(step: Features) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        feed(StepFit(), step, 0.01)


def test_an_invalid_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="memory_steps"):
        StepFit(memory_steps=1)
    with pytest.raises(ValueError, match="min_steps"):
        StepFit(min_steps=-1)
    with pytest.raises(ValueError, match="max_error"):
        StepFit(max_error=0.0)
