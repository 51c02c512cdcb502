"""The arithmetic of counters, gauges and histograms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec
from penstock.server.observe.metrics.tables import CounterTable, GaugeTable, HistogramTable

HISTOGRAM = MetricSpec("h_seconds", MetricKind.HISTOGRAM, "H.", (), (0.25, 0.5, 1.0))
COUNTER = MetricSpec("c_total", MetricKind.COUNTER, "C.", ("reason",))


def figures(table: HistogramTable) -> dict[str, float]:
    family = table.family((), ())
    return {s.labels.get("le", s.name.rpartition("_")[2]): s.value for s in family.samples}


def test_a_value_equal_to_a_bound_is_counted_below_it() -> None:
    table = HistogramTable(HISTOGRAM)

    table.observe([0.25, 0.5, 0.75, 4.0])

    assert figures(table) == {
        "0.25": 1, "0.5": 2, "1.0": 3, "+Inf": 4, "count": 4, "sum": 5.5,
    }  # fmt: skip


def test_weights_count_a_value_several_times() -> None:
    table = HistogramTable(HISTOGRAM)

    table.observe([0.5, 0.125, 2.0], weights=np.asarray([256, 0, 2], dtype=np.uint32))

    assert figures(table) == {
        "0.25": 0, "0.5": 256, "1.0": 256, "+Inf": 258, "count": 258, "sum": 132.0,
    }  # fmt: skip


def test_values_that_are_not_finite_are_ignored() -> None:
    table = HistogramTable(HISTOGRAM)

    table.observe([float("nan"), float("inf"), 0.25], weights=[5, 5, 1])

    assert figures(table)["count"] == 1
    assert figures(table)["sum"] == 0.25


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 50)), max_size=20))
def test_arrays_count_as_their_values_one_by_one(drawn: list[tuple[int, int]]) -> None:
    at_once, singly = HistogramTable(HISTOGRAM), HistogramTable(HISTOGRAM)
    values = [numerator / 1024 for numerator, _ in drawn]

    at_once.observe(values, weights=[times for _, times in drawn])
    for single, (_, times) in zip(values, drawn, strict=True):
        for _ in range(times):
            singly.observe([single])

    assert figures(at_once) == figures(singly)


def test_a_counter_does_not_go_down() -> None:
    table = CounterTable(COUNTER)
    table.add(2, "full")

    with pytest.raises(ValueError, match="c_total cannot decrease"):
        table.add(-1, "full")
    with pytest.raises(ValueError, match="c_total cannot decrease"):
        table.add(float("nan"), "full")

    assert table.value("full") == 2


def test_labels_must_be_those_of_the_metric() -> None:
    with pytest.raises(ValueError, match="has the labels"):
        CounterTable(COUNTER).add(1)
    with pytest.raises(ValueError, match="is not a gauge"):
        GaugeTable(COUNTER)
    with pytest.raises(ValueError, match="must rise"):
        HistogramTable(MetricSpec("h", MetricKind.HISTOGRAM, "H.", (), (1.0, 1.0)))


def test_series_without_labels_are_there_from_the_start() -> None:
    tables: dict[MetricKind, type[CounterTable | GaugeTable | HistogramTable]] = {
        MetricKind.COUNTER: CounterTable,
        MetricKind.GAUGE: GaugeTable,
        MetricKind.HISTOGRAM: HistogramTable,
    }
    for spec in CATALOGUE:
        if not spec.labels:
            assert tables[spec.kind](spec).family((), ()).samples


def test_the_catalogue_follows_the_naming_conventions_of_prometheus() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(set(names)) == len(names)
    for spec in CATALOGUE:
        assert spec.name.startswith("penstock_")
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
        assert spec.help.endswith(".") or spec.help.endswith("to 1.")


@pytest.mark.parametrize("name", ["time_to_first_token", "inter_token_latency"])
def test_buckets_resolve_a_token_of_a_millisecond(name: str) -> None:
    (spec,) = (spec for spec in CATALOGUE if spec.name == f"penstock_{name}_seconds")
    assert spec.buckets[0] <= 0.0005
    assert sum(bound <= 0.005 for bound in spec.buckets) >= 4
