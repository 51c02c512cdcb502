"""Output lengths learnt from finished and cancelled requests."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.scheduler.output_lengths import OutputBounds, OutputLengths, RunningOutputs


def test_the_mean_is_of_those_that_ended() -> None:
    lengths = OutputLengths(100.0, memory=1_000_000)
    for num_tokens in (40, 40, 20):
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(50.0, rel=1e-3)


def test_old_output_lengths_lose_weight() -> None:
    lengths = OutputLengths(memory=16)
    for num_tokens in [1000] * 100 + [10] * 100:
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(10.0, abs=5.0)


def test_an_empty_output_counts_as_one_token() -> None:
    lengths = OutputLengths(1.0)
    lengths.observe(0)

    assert lengths.mean_tokens == 1.0


@pytest.mark.parametrize("mean", [20, 200, 2000])
@pytest.mark.parametrize("limits", [(512, 512), (10, 2000)])
def test_expected_lengths_equal_real_ones_on_average(mean: int, limits: tuple[int, int]) -> None:
    lengths = OutputLengths(100.0, memory=2000)
    random = np.random.default_rng(3)
    real = expected = 0.0
    for index, length in enumerate(random.geometric(1 / mean, size=8_000).tolist()):
        limit = int(random.integers(limits[0], limits[1] + 1))
        if index > 3000:
            real += min(length, limit)
            expected += lengths.expected(limit)
        lengths.observe(min(length, limit), is_cut=length > limit)

    assert expected == pytest.approx(real, rel=0.05)
    assert lengths.mean_tokens == pytest.approx(mean, rel=0.15)


def test_where_no_request_ends_by_itself_every_limit_is_reached() -> None:
    lengths = OutputLengths(10.0, memory=64)
    for _ in range(1000):
        lengths.observe(400, is_cut=True)

    assert lengths.expected(300) == pytest.approx(300.0, rel=0.01)
    assert lengths.expected_remaining(4, 1200) == pytest.approx(1200.0, rel=0.01)


def test_remaining_output_is_bounded_by_the_limits() -> None:
    lengths = OutputLengths(100.0)

    assert lengths.expected_remaining(4, 10_000) == pytest.approx(400.0)
    assert 0.7 * 120 < lengths.expected_remaining(4, 120) < 120
    assert lengths.expected_remaining(0, 0) == 0.0


def test_an_invalid_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="prior_tokens"):
        OutputLengths(0.5)
    with pytest.raises(ValueError, match="memory"):
        OutputLengths(memory=0)


# The distribution.

FREE = OutputBounds(max_tokens=4096)


def learned(lengths: list[int], *, tenant: str = "a", cut_at: int = 10**6) -> OutputLengths:
    outputs = OutputLengths(memory=4096)
    for length in lengths:
        outputs.observe(min(length, cut_at), is_cut=length > cut_at, tenant=tenant, max_tokens=4096)
    return outputs


def lognormal(num: int, mean: float = 250.0, sigma: float = 0.8) -> list[int]:
    random = np.random.default_rng(7)
    drawn = random.lognormal(np.log(mean) - sigma**2 / 2.0, sigma, num)
    return [max(round(length), 1) for length in drawn.tolist()]


@pytest.mark.parametrize("cut_at", [10**6, 300])
def test_the_distribution_is_that_of_the_outputs_also_where_long_ones_are_cut(cut_at: int) -> None:
    lengths = np.array(lognormal(4000))
    distribution = learned(lengths.tolist(), cut_at=cut_at).distribution("a", 4096)
    assert distribution is not None
    for num_tokens in (50, 100, 200, 290):
        real = float((lengths <= num_tokens).mean())
        assert distribution.chance_within(num_tokens, FREE) == pytest.approx(real, abs=0.03)
    assert distribution.tokens_with(0.5, FREE) == pytest.approx(np.median(lengths), rel=0.05)


def test_generated_tokens_count_in_the_prediction() -> None:
    lengths = np.array(lognormal(4000))
    distribution = learned(lengths.tolist()).distribution("a", 4096)
    assert distribution is not None
    later = lengths[lengths > 200]
    bounds = OutputBounds(max_tokens=4096, num_known=200)
    real = float((later <= 300).mean())
    assert distribution.chance_within(300, bounds) == pytest.approx(real, abs=0.03)
    assert distribution.chance_within(200, bounds) == 0.0


def test_bounds_are_exact_whatever_was_learned() -> None:
    distribution = learned(lognormal(100)).distribution("a", 4096)
    assert distribution is not None
    bounds = OutputBounds(min_tokens=30, max_tokens=40)
    assert distribution.chance_within(29, bounds) == 0.0
    assert 0.0 < distribution.chance_within(30, bounds) < 1.0
    assert distribution.chance_within(40, bounds) == 1.0
    assert distribution.tokens_with(0.0, bounds) == 30
    assert distribution.tokens_with(1.0, bounds) == 40
    assert distribution.tokens_with(0.999, bounds) == 40


def test_outputs_are_predicted_from_their_tenant_or_from_all_if_it_is_new() -> None:
    outputs = learned([20] * 60, tenant="short")
    for _ in range(60):
        outputs.observe(800, tenant="long", max_tokens=4096)
    short, long, new = (outputs.distribution(name, 4096) for name in ("short", "long", "new"))
    assert short is not None
    assert long is not None
    assert new is not None
    assert short.chance_within(100, FREE) > 0.9
    assert long.chance_within(100, FREE) < 0.1
    assert new.chance_within(100, FREE) == pytest.approx(0.5, abs=0.1)


def test_no_length_is_predicted_before_some_outputs_have_ended() -> None:
    assert learned([100] * 15).distribution("a", 4096) is None
    assert learned([100] * 16).distribution("a", 4096) is not None


def test_running_outputs_correct_the_bias_to_short_ones() -> None:
    outputs = learned([10] * 20)
    alone = outputs.distribution("a", 2048)
    running = RunningOutputs(
        num_tokens=np.full(60, 500, dtype=np.int32),
        is_of_tenant=np.ones(60, dtype=np.bool_),
        has_limit=np.ones(60, dtype=np.bool_),
    )
    mixed = outputs.distribution("a", 4096, lambda: running)
    assert alone is not None
    assert mixed is not None
    assert alone.chance_within(20, FREE) > 0.9
    assert mixed.chance_within(20, FREE) < 0.5


def test_outputs_cut_by_their_limit_do_not_predict_endless_outputs() -> None:
    outputs = OutputLengths()
    for _ in range(500):
        outputs.observe(8, is_cut=True, max_tokens=8)
    distribution = outputs.distribution("", 4096)
    assert distribution is not None
    assert distribution.chance_within(1000, FREE) > 0.9
