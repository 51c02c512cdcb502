"""Prometheus exposition of the metrics: format and naming scheme.

Owns the choice of the encoding. Does not know HTTP.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.server.observe.metrics.aliases import DIALECTS, Dialect, aliased

COMPAT_NAMES = tuple(DIALECTS)


class _WithAliases(Collector):
    def __init__(self, collector: Collector, dialect: Dialect) -> None:
        self._collector = collector
        self._dialect = dialect

    def collect(self) -> Iterator[Metric]:
        families = list(self._collector.collect())
        yield from families
        yield from aliased(families, self._dialect)


class Exposition:
    """The text of a collector's metrics and of this process's own."""

    def __init__(self, collector: Collector) -> None:
        self._plain = _registry(collector)
        self._compat = {
            name: _registry(_WithAliases(collector, dialect)) for name, dialect in DIALECTS.items()
        }

    def render(self, accept: str, compat: str = "") -> tuple[bytes, str]:
        """The text and its content type, for an `Accept` header and one of COMPAT_NAMES.

        Raises ValueError for another name.
        """
        registry = self._compat.get(compat) if compat else self._plain
        if registry is None:
            raise ValueError(f"compat must be one of {', '.join(COMPAT_NAMES)}")
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


def _registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
