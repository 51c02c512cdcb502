"""Where traces are put together: provider, sampler, exporters, the thread that writes.

Owns the composition and its end. The provider is nobody else's: it is not made the process's.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.trace import TracerProvider

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.service_listeners import ServiceListener
from penstock.server.observe.spans.clock import UnixClock
from penstock.server.observe.spans.exporters import make_exporters
from penstock.server.observe.spans.identity import our_resource, package_version
from penstock.server.observe.spans.ids import PlannedIds
from penstock.server.observe.spans.outlet import Outlet
from penstock.server.observe.spans.quiet_logs import quieten_exporters
from penstock.server.observe.spans.sampler import KeepSampler, sampler_from
from penstock.server.observe.spans.span_writer import SpanWriter
from penstock.server.observe.spans.tally import Tally
from penstock.server.observe.spans.variables import (
    check_numbers,
    max_batch_spans,
    max_queue_spans,
)
from penstock.server.observe.spans.worker import TraceWorker

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 0.2
"""Of the time to close: what exporters get to end an export that hangs."""


class Tracing(ServiceListener):
    """Makes traces of records. Calls but `close` return at once."""

    def __init__(
        self, provider: TracerProvider, outlets: Sequence[Outlet], worker: TraceWorker, tally: Tally
    ) -> None:
        self._provider = provider
        self._outlets = tuple(outlets)
        self._worker = worker
        self._tally = tally

    def take_records(self, records: Sequence[RequestRecord]) -> None:
        """Requests that have ended: each becomes a trace, or is sampled out, or counted as lost."""
        self._worker.put(records)

    def counters(self) -> dict[str, int]:
        """What became of traces and spans since the start: the names of `tally.NAMES`."""
        return self._tally.counts()

    def close(self, limit_s: float) -> None:
        """Write and export what there is, for `limit_s` seconds at most. Blocks that long.

        What is not out by then is dropped and counted. To be called once.
        """
        deadline_s = time.monotonic() + limit_s
        patience_s = max(0.0, limit_s - _LAST_WORDS_S)
        self._worker.finish(patience_s)
        for outlet in self._outlets:
            outlet.give_up()
        self._worker.give_up()
        # The SDK's shutdown takes no limit and waits for up to 30 seconds.
        shutdown = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        shutdown.start()
        shutdown.join(max(0.0, deadline_s - _LAST_WORDS_S - time.monotonic()))
        if shutdown.is_alive():
            for outlet in self._outlets:
                outlet.exporter.shutdown()
            shutdown.join(max(0.0, deadline_s - time.monotonic()))
        if shutdown.is_alive():
            for outlet in self._outlets:
                outlet.abandon()
        counts = self._tally.counts()
        _log.info(
            "traces and spans, from start to end: %s",
            ", ".join(f"{name} {num}" for name, num in counts.items() if num) or "none",
        )


def start_tracing(
    config: TracingConfig, *, model: str, environment: Mapping[str, str] | None = None
) -> Tracing:
    """Start tracing as the `OTEL_*` variables say. `model`: the one that is served.

    `environment`: where variables are read that are not read by the SDK itself; this process's if
    None. Raises ValueError naming a variable that makes no sense.
    """
    environment = os.environ if environment is None else environment
    check_numbers(environment)
    quieten_exporters(environment)
    tally = Tally()
    ids = PlannedIds()
    queue_spans, batch_spans = max_queue_spans(environment), max_batch_spans(environment)
    exporters = make_exporters(environment)
    provider = TracerProvider(
        sampler=KeepSampler(sampler_from(environment)),
        resource=our_resource(package_version()),
        # Its own way of closing at exit would take 30 seconds; ours is `close`.
        shutdown_on_exit=False,
        id_generator=ids,
    )
    outlets = [Outlet(exporter, queue_spans, tally, batch_spans) for exporter in exporters]
    for outlet in outlets:
        provider.add_span_processor(outlet)
    writer = SpanWriter(
        provider, ids, config, model=model, version=package_version(), clock=UnixClock()
    )
    worker = TraceWorker(writer.write, tally)
    worker.start()
    return Tracing(provider, outlets, worker, tally)
