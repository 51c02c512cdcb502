"""All metrics of the catalogue with their present values.

Owns one table for each metric. Does not know what moves them; not thread-safe.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from penstock.server.observe.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec
from penstock.server.observe.metrics.tables import CounterTable, GaugeTable, HistogramTable


class Board:
    """Tables by spec; `constant` labels are on every series."""

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
        """Its table."""
        return self._counters[spec]

    def gauge(self, spec: MetricSpec) -> GaugeTable:
        """Its table."""
        return self._gauges[spec]

    def histogram(self, spec: MetricSpec) -> HistogramTable:
        """Its table."""
        return self._histograms[spec]

    def families(self) -> Iterator[Metric]:
        """Every metric that has a series, in the order of the catalogue."""
        tables: Mapping[MetricSpec, CounterTable | GaugeTable | HistogramTable] = {
            **self._counters,
            **self._gauges,
            **self._histograms,
        }
        for spec in CATALOGUE:
            family = tables[spec].family(self._constant, self._names)
            if family.samples:
                yield family
