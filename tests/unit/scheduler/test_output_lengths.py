"""The mean output length: what it remembers and what bounds it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.scheduler.output_lengths import OutputLengths


def test_output_lengths_are_a_running_mean() -> None:
    lengths = OutputLengths(100.0)
    for num_tokens in (40, 40, 20):
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(50.0)
    assert lengths.expected(512) == pytest.approx(50.0)
    assert lengths.expected(8) == 8.0


def test_output_lengths_forget() -> None:
    lengths = OutputLengths(memory=16)
    for num_tokens in [1000] * 100 + [10] * 100:
        lengths.observe(num_tokens)

    assert lengths.mean_tokens == pytest.approx(10.0, abs=5.0)


def test_an_output_of_nothing_counts_as_one() -> None:
    lengths = OutputLengths(1.0)
    lengths.observe(0)

    assert lengths.mean_tokens == 1.0


def test_remaining_output_is_bounded_by_the_limits() -> None:
    lengths = OutputLengths(100.0)

    assert lengths.expected_remaining(4, 10_000) == 400.0
    assert lengths.expected_remaining(4, 120) == 120.0
    assert lengths.expected_remaining(0, 0) == 0.0


def test_names_the_parameter_that_is_off() -> None:
    with pytest.raises(ValueError, match="prior_tokens"):
        OutputLengths(0.5)
    with pytest.raises(ValueError, match="memory"):
        OutputLengths(memory=0)


def test_who_was_cut_off_would_have_gone_on() -> None:
    lengths = OutputLengths(100.0, memory=100_000)
    cut = OutputLengths(100.0, memory=100_000)
    random = np.random.default_rng(3)
    for length in random.geometric(1 / 200, size=5000).tolist():
        lengths.observe(length)
        if length <= 150:
            cut.observe(length)
        else:
            cut.observe_cut(150)

    assert cut.mean_tokens == pytest.approx(lengths.mean_tokens, rel=0.1)
