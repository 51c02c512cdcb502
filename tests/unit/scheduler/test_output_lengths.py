"""How long outputs are: what is learnt from those that ended and from those that were cut."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.scheduler.output_lengths import OutputLengths


def test_the_mean_is_of_those_that_ended() -> None:
    lengths = OutputLengths(100.0, memory=1_000_000)
    for num_tokens in (40, 40, 20):
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(50.0, rel=1e-3)


def test_output_lengths_forget() -> None:
    lengths = OutputLengths(memory=16)
    for num_tokens in [1000] * 100 + [10] * 100:
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(10.0, abs=5.0)


def test_an_output_of_nothing_counts_as_one() -> None:
    lengths = OutputLengths(1.0)
    lengths.observe(0)

    assert lengths.mean_tokens == 1.0


@pytest.mark.parametrize("mean", [20, 200, 2000])
@pytest.mark.parametrize("limits", [(512, 512), (10, 2000)])
def test_what_is_expected_is_what_comes(mean: int, limits: tuple[int, int]) -> None:
    lengths = OutputLengths(100.0, memory=2000)
    random = np.random.default_rng(3)
    real = expected = 0.0
    for index, length in enumerate(random.geometric(1 / mean, size=20_000).tolist()):
        limit = int(random.integers(limits[0], limits[1] + 1))
        if index > 5000:
            real += min(length, limit)
            expected += lengths.expected(limit)
        lengths.observe(min(length, limit), is_cut=length > limit)

    assert expected == pytest.approx(real, rel=0.05)
    assert lengths.mean_tokens == pytest.approx(mean, rel=0.15)


def test_where_nobody_ends_by_itself_every_limit_is_reached() -> None:
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


def test_names_the_parameter_that_is_off() -> None:
    with pytest.raises(ValueError, match="prior_tokens"):
        OutputLengths(0.5)
    with pytest.raises(ValueError, match="memory"):
        OutputLengths(memory=0)
