"""Stores the values of counters, gauges and histograms by their label values.

Converts the values to `prometheus_client` metrics. The histograms of prometheus_client add one
value at a time; the histograms of this module add arrays with weights. Not thread-safe.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.server.observe.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec

Labels = tuple[str, ...]


class CounterTable:
    """The series of one counter, by their label values. A series exists after `begin` or its first
    `add`; the series of a counter without labels exists from the start, with value 0."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = _of_kind(spec, MetricKind.COUNTER)
        self._values: dict[Labels, float] = {}
        if not spec.labels:
            self.begin()

    def begin(self, *labels: str) -> None:
        """Create the series with value 0, if it does not exist. Raises ValueError for a wrong
        number of labels."""
        self._values.setdefault(_checked(self._spec, labels), 0)

    def add(self, amount: float, *labels: str) -> None:
        """Increment the series. Raises ValueError for a negative amount or a wrong number of
        labels."""
        if not amount >= 0:
            raise ValueError(f"{self._spec.name} cannot decrease, by {amount}")
        _checked(self._spec, labels)
        self._values[labels] = self._values.get(labels, 0) + amount

    def value(self, *labels: str) -> float:
        """Return the current count; 0 if the series does not exist."""
        return self._values.get(labels, 0)

    def family(self, constant: Labels, constant_names: Labels) -> Metric:
        """Return the metric with all its series. The labels of each series begin with the constant
        labels. Their names are `constant_names`, and their values are `constant`."""
        names = (*constant_names, *self._spec.labels)
        family = CounterMetricFamily(self._spec.name, self._spec.help, labels=names)
        for labels, value in self._values.items():
            family.add_metric((*constant, *labels), value)
        return family


class GaugeTable:
    """The series of one gauge, by their label values. The series of a gauge without labels exists
    from the start, with value 0."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = _of_kind(spec, MetricKind.GAUGE)
        self._values: dict[Labels, float] = {}
        if not spec.labels:
            self.set(0)

    def set(self, value: float, *labels: str) -> None:
        """Set the value of a series. Raises ValueError for a wrong number of labels."""
        self._values[_checked(self._spec, labels)] = value

    def value(self, *labels: str) -> float:
        """Return the current value; 0 if none was set."""
        return self._values.get(labels, 0)

    def clear(self) -> None:
        """Remove all series."""
        self._values.clear()

    def family(self, constant: Labels, constant_names: Labels) -> Metric:
        """Return the metric with all its series. The labels of each series begin with the constant
        labels. Their names are `constant_names`, and their values are `constant`."""
        names = (*constant_names, *self._spec.labels)
        family = GaugeMetricFamily(self._spec.name, self._spec.help, labels=names)
        for labels, value in self._values.items():
            family.add_metric((*constant, *labels), value)
        return family


@dataclass(slots=True)
class _Distribution:
    counts: NDArray[np.int64]
    total: float = field(default=0.0)


class HistogramTable:
    """The series of one histogram, by their label values. The constructor raises ValueError unless
    the bucket bounds increase."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = _of_kind(spec, MetricKind.HISTOGRAM)
        self._bounds = np.asarray(spec.buckets, dtype=np.float64)
        if not len(self._bounds) or not (np.diff(self._bounds) > 0).all():
            raise ValueError(f"the buckets of {spec.name} must rise")
        self._ends = (*(repr(float(bound)) for bound in spec.buckets), "+Inf")
        self._series: dict[Labels, _Distribution] = {}
        if not spec.labels:
            self.begin()

    def begin(self, *labels: str) -> _Distribution:
        """Return the series of these label values; create it without observations if it does not
        exist. Raises ValueError for a wrong number of labels."""
        found = self._series.get(_checked(self._spec, labels))
        if found is None:
            found = _Distribution(np.zeros(len(self._ends), dtype=np.int64))
            self._series[labels] = found
        return found

    def observe(self, values: ArrayLike, *labels: str, weights: ArrayLike | None = None) -> None:
        """Add values of shape [n], each as often as its integer weight (shape [n]; None: once).
        Values that are not finite and values without a positive weight are ignored."""
        array = np.asarray(values, dtype=np.float64)
        times = np.ones(len(array), np.int64) if weights is None else np.asarray(weights, np.int64)
        real = np.isfinite(array) & (times > 0)
        array, times = array[real], times[real]
        if not len(array):
            return
        series = self.begin(*labels)
        # An upper bound belongs to its bucket. Counts below 2**53 are exact in a float.
        index = np.searchsorted(self._bounds, array, side="left")
        counts = np.bincount(index, weights=times, minlength=len(self._ends))
        series.counts += counts.astype(np.int64)
        series.total += float(np.dot(array, times))

    def family(self, constant: Labels, constant_names: Labels) -> Metric:
        """Return the metric with all its series. The labels of each series begin with the constant
        labels. Their names are `constant_names`, and their values are `constant`."""
        names = (*constant_names, *self._spec.labels)
        family = HistogramMetricFamily(self._spec.name, self._spec.help, labels=names)
        for labels, series in self._series.items():
            ends: Sequence[int] = np.cumsum(series.counts).tolist()
            buckets = list(zip(self._ends, ends, strict=True))
            family.add_metric((*constant, *labels), buckets, series.total)
        return family


def _of_kind(spec: MetricSpec, kind: MetricKind) -> MetricSpec:
    if spec.kind is not kind:
        raise ValueError(f"{spec.name} is not a {kind.value}")
    return spec


def _checked(spec: MetricSpec, labels: Labels) -> Labels:
    if len(labels) != len(spec.labels):
        raise ValueError(f"{spec.name} has the labels {spec.labels}, not {len(labels)} values")
    return labels


class MetricTables:
    """The tables of all metrics of the catalogue. All series have the labels `constant`, a mapping
    of names to values, in addition to the labels of their metric."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._names = tuple(constant)
        self._constant = tuple(constant.values())
        self._counters: dict[MetricSpec, CounterTable] = {}
        self._gauges: dict[MetricSpec, GaugeTable] = {}
        self._histograms: dict[MetricSpec, HistogramTable] = {}
        for spec in CATALOGUE:
            match spec.kind:
                case MetricKind.COUNTER:
                    self._counters[spec] = CounterTable(spec)
                case MetricKind.GAUGE:
                    self._gauges[spec] = GaugeTable(spec)
                case MetricKind.HISTOGRAM:
                    self._histograms[spec] = HistogramTable(spec)

    def counter(self, spec: MetricSpec) -> CounterTable:
        """Return the table of a counter. Raises KeyError if `spec` is not a counter of the
        catalogue."""
        return self._counters[spec]

    def gauge(self, spec: MetricSpec) -> GaugeTable:
        """Return the table of a gauge. Raises KeyError if `spec` is not a gauge of the
        catalogue."""
        return self._gauges[spec]

    def histogram(self, spec: MetricSpec) -> HistogramTable:
        """Return the table of a histogram. Raises KeyError if `spec` is not a histogram of the
        catalogue."""
        return self._histograms[spec]

    def families(self) -> Iterator[Metric]:
        """Yield all metrics that have a series, in the order of the catalogue."""
        tables: Mapping[MetricSpec, CounterTable | GaugeTable | HistogramTable] = {
            **self._counters,
            **self._gauges,
            **self._histograms,
        }
        for spec in CATALOGUE:
            family = tables[spec].family(self._constant, self._names)
            if family.samples:
                yield family
