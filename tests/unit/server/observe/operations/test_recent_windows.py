"""Sums over ten seconds and percentiles over a minute are accurate, use bounded memory, and drop
old values.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.server.observe.operations.engine_steps import DurationWindow, SumWindow


def test_percentiles_are_within_one_percent_of_the_true_ones() -> None:
    window = DurationWindow()
    values = np.random.default_rng(1).lognormal(-4, 2, size=10_000)
    window.add(100.0, values)

    reported = window.percentiles(100.5)

    ordered = np.sort(values)
    for level, reported_s in ((0.5, reported.p50_s), (0.9, reported.p90_s), (0.99, reported.p99_s)):
        true_s = ordered[math.ceil(level * len(ordered)) - 1]
        assert reported_s == pytest.approx(true_s, rel=0.0101)
    assert reported.num == 10_000


def test_a_weight_counts_a_value_several_times() -> None:
    weighted, plain = DurationWindow(), DurationWindow()
    weighted.add(5.0, [0.01, 0.02, math.nan], [90, 10, 5])
    plain.add(5.0, [0.01] * 90 + [0.02] * 10)

    assert weighted.percentiles(5.0) == plain.percentiles(5.0)
    assert weighted.percentiles(5.0).num == 100


def test_nothing_and_nan_have_no_percentiles() -> None:
    window = DurationWindow()
    window.add(1.0, [math.nan])
    window.add(1.0, [])
    window.add(1.0, [0.5], [0])

    reported = window.percentiles(1.0)

    assert (reported.p50_s, reported.p90_s, reported.p99_s, reported.num) == (None, None, None, 0)


def test_values_older_than_a_minute_are_dropped() -> None:
    window = DurationWindow()
    window.add(0.5, [1.0])
    window.add(30.0, [2.0])

    assert window.percentiles(59.9).num == 2
    assert window.percentiles(60.0).num == 1
    assert window.percentiles(90.0).num == 0


def test_a_reused_slot_forgets_its_earlier_values() -> None:
    window = DurationWindow()
    window.add(3.0, [1.0] * 7)
    window.add(63.0, [2.0])
    window.add(3.5, [1.0])  # long past: its place is taken

    assert window.percentiles(63.0).num == 1


@pytest.mark.parametrize("value_s", [0.0, 1e-9, 1e9])
def test_extremes_are_reported_as_the_bounds(value_s: float) -> None:
    window = DurationWindow()
    window.add(1.0, [value_s])

    reported_s = window.percentiles(1.0).p50_s

    assert reported_s is not None
    assert reported_s == pytest.approx(min(max(value_s, 1e-5), 1e5), rel=0.02)


def test_sums_are_over_a_sliding_window() -> None:
    window = SumWindow(2)
    times_s = np.arange(0.0, 30.0, 0.1) + 0.05
    window.add(times_s, np.column_stack((np.ones(300), np.full(300, 5.0))))

    ones, fives = window.sums(30.0) / window.covered_s(30.0)

    assert ones == pytest.approx(10.0, rel=0.03)
    assert fives == pytest.approx(50.0, rel=0.03)
    assert window.sums(50.0).tolist() == [0.0, 0.0]


def test_the_first_seconds_are_not_spread_over_ten() -> None:
    window = SumWindow(1)
    window.add(np.array([100.0, 101.0, 102.0]), np.array([[6.0], [6.0], [6.0]]))

    assert window.sums(103.0)[0] / window.covered_s(103.0) == pytest.approx(6.0)
