"""All metrics of a service, computed from the data that the observer process receives.

Owns the tables, and a lock for them, because records and steps arrive on the event loop and scrapes
on other threads. CPU time and memory of the processes are read when metrics are collected.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.server.ipc.board import LoadState
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.frames import Heartbeat
from penstock.server.observe.listeners import NO_TOTALS, ServiceListener
from penstock.server.observe.metrics import catalogue, labels
from penstock.server.observe.metrics.catalogue import MetricSpec
from penstock.server.observe.metrics.front_metrics import FrontMetrics, RequestMetrics
from penstock.server.observe.metrics.step_metrics import StepMetrics
from penstock.server.observe.metrics.tables import MetricTables
from penstock.server.observe.request_record import RequestRecord
from penstock.server.process_table import usage_of

Processes = Callable[[], Mapping[str, int]]
"""Returns the current process ids by name, such as `engine`, `front` or `supervisor`."""


class ProcessUsage:
    """Updates the metrics of CPU time and resident memory of the service's processes."""

    def __init__(self, tables: MetricTables, processes: Processes) -> None:
        self._tables = tables
        self._processes = processes
        self._counted: dict[tuple[str, int], float] = {}

    def update(self) -> None:
        """Read the usage of all processes and set the metrics. If a process is replaced by one with
        the same name, their CPU times are summed."""
        memory = self._tables.gauge(catalogue.PROCESS_MEMORY)
        memory.clear()
        counted: dict[tuple[str, int], float] = {}
        for name, pid in self._processes().items():
            if (usage := usage_of(pid)) is None:
                continue
            memory.set(usage.resident_bytes, name)
            before = self._counted.get((name, pid), 0.0)
            counted[name, pid] = max(before, usage.cpu_s)
            self._tables.counter(catalogue.PROCESS_CPU).add(counted[name, pid] - before, name)
        self._counted = counted


TraceCounts = Callable[[], Mapping[str, int]]
"""Returns the outcomes of traces and spans since the start by name, such as `traces_kept` or
`spans_dropped_export`; the part after `_dropped_` is the reason. Called on any thread."""

Load = Callable[[], LoadState | None]
"""Returns the load that the engine reports now; None if it reports none. Called on any thread."""


def _no_counts() -> Mapping[str, int]:
    return {}


def _no_processes() -> Mapping[str, int]:
    return {}


def _no_load() -> None:
    return None


class ServiceMetrics(ServiceListener, Collector):
    """Computes the metrics of a service from the observer's events; a `prometheus_client`
    collector.

    `model` is the value of the label `model` of all series; model names sent by clients are not
    used. `tenants` are the tenants with separate series. `methods` are the full names of the RPC
    methods that carry requests; the first one has series from the start. `trace_counts`,
    `processes` and `load` are called when metrics are collected. Without `load`, the load of the
    engine is its load in the last step.
    """

    def __init__(
        self,
        *,
        model: str,
        version: str = "",
        tenants: Collection[str] = (),
        methods: Sequence[str] = (),
        trace_counts: TraceCounts = _no_counts,
        processes: Processes = _no_processes,
        load: Load = _no_load,
    ) -> None:
        self._lock = threading.Lock()
        self._tables = MetricTables({"model": model})
        self._requests = RequestMetrics(self._tables, tenants)
        self._steps = StepMetrics(self._tables)
        self._fronts = FrontMetrics(self._tables, methods)
        self._usage = ProcessUsage(self._tables, processes)
        self._load = load
        self._trace_counts = trace_counts
        self._tables.gauge(catalogue.BUILD).set(1, version or labels.NONE)
        for reason in labels.TRACE_DROPS:
            self._tables.counter(catalogue.TRACE_DROPPED).begin(reason)
        for outcome in labels.TRACE_OUTCOMES:
            self._tables.counter(catalogue.TRACES).begin(outcome)
        for outcome in labels.SPAN_OUTCOMES:
            self._tables.counter(catalogue.SPANS).begin(outcome)

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Update the histograms and counters with ended requests."""
        with self._lock:
            self._requests.add(records)
            self._fronts.add_records(records)

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Update the metrics from the heartbeat of a front (gRPC server process)."""
        with self._lock:
            self._fronts.add_heartbeat(heartbeat)
            self._steps.set_engine_up(self._fronts.epoch, self._fronts.is_engine_up)

    def set_engine(self, hello: EngineHello) -> None:
        """Record the engine's epoch, number of blocks, block size and number of batch slots.

        Steps also report the number of blocks, but not the block size and the number of slots.
        """
        with self._lock:
            self._steps.set_engine(hello)

    def add_steps(
        self,
        epoch: int,
        rows: NDArray[Any],
        num_missed: int,
        totals: Mapping[str, int] = NO_TOTALS,
    ) -> None:
        """Update the metrics with steps of the engine of `epoch`. Without `totals`, the counters
        include only the steps that were read."""
        with self._lock:
            self._steps.add_steps(epoch, rows, num_missed)
            if totals:
                self._steps.set_totals(epoch, totals)

    def front_disconnected(self, front_id: int) -> None:
        """Remove a front that has ended from the gauges. Its counts are kept."""
        with self._lock:
            self._fronts.front_disconnected(front_id)
            self._steps.set_engine_up(self._fronts.epoch, self._fronts.is_engine_up)

    def collect(self) -> Iterator[Metric]:
        """Return all current metrics. Thread-safe."""
        with self._lock:
            self._steps.set_gauges(self._load())
            self._usage.update()
            self._count_traces()
            families = list(self._tables.families())
        return iter(families)

    def _count_traces(self) -> None:
        counts = self._trace_counts()
        for spec, unit, outcomes in (
            (catalogue.TRACES, "traces_", labels.TRACE_OUTCOMES),
            (catalogue.SPANS, "spans_", labels.SPAN_OUTCOMES),
        ):
            for outcome in outcomes:
                num = sum(n for name, n in counts.items() if name.startswith(unit + outcome))
                self._raise_to(spec, num, outcome)
        lost: Counter[str] = Counter()
        for name, num in counts.items():
            _, _, reason = name.partition("_dropped_")
            if reason:
                lost[reason] += num
        for reason, num in lost.items():
            self._raise_to(catalogue.TRACE_DROPPED, num, reason)

    def _raise_to(self, spec: MetricSpec, num: int, label: str) -> None:
        table = self._tables.counter(spec)
        table.add(max(0, num - table.value(label)), label)
