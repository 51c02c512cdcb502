"""Creates the tracing pipeline (provider, sampler, exporters, writer thread) and shuts it down.

The provider is not global. The SDK's `_OTelSDKConfigurator` is not used, because it would configure
traces, metrics and logs for the whole process and flush them for up to 30 seconds on exit.
Exporters are found by their entry points `opentelemetry_traces_exporter`, so any installed exporter
can be used. They read their other environment variables (endpoint, headers, certificates,
compression) themselves.

The observer's event loop passes records to a thread through a bounded queue and never waits.
Records that do not fit are dropped and counted.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.listeners import ServiceListener
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.sampler import KeepSampler, sampler_from
from penstock.server.observe.spans.span_processor import BoundedSpanProcessor, SpanCounts
from penstock.server.observe.spans.span_writer import PlannedIds, SpanWriter, UnixClock
from penstock.server.observe.spans.variables import (
    check_numbers,
    max_batch_spans,
    max_queue_spans,
)

_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.attributes",
)
PAUSE_S = 60.0
_HEADER_LOGGER = "opentelemetry.util.re"
_HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")


MAX_QUEUED_RECORDS = 4096
_LOG_PAUSE_S = 60.0
_LAST_TRACE_S = 0.2

logger = logging.getLogger(__name__)
SERVICE_NAME = "penstock"
DEFAULT_TIMEOUT_S = 2.0
"""Timeout of one export with all its retries, unless an environment variable overrides it. The
SDK's 10 seconds would delay the end of the process and keep old spans in memory."""
_TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_ABORT_S = 0.2
"""The part of the close timeout in which exporters must end a hanging export, in seconds."""


class TraceWorker:
    """Runs `write` for each record, in order, on a separate thread.

    `write` returns False if the trace is not kept. `counts` receives the outcome of each record.
    """

    def __init__(
        self,
        write: Callable[[RequestRecord], bool],
        counts: SpanCounts,
        max_queued: int = MAX_QUEUED_RECORDS,
    ) -> None:
        self._write = write
        self._counts = counts
        self._max_queued = max_queued
        self._queue: deque[RequestRecord] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_given_up = False
        self._quiet_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="trace-worker", daemon=True)

    def start(self) -> None:
        """Start the thread. It also writes the records that are queued already."""
        self._thread.start()

    def put(self, records: Sequence[RequestRecord]) -> None:
        """Queue records up to `max_queued` in total; drop and count the others."""
        if not records:
            return
        with self._changed:
            room = 0 if self._is_closing else self._max_queued - len(self._queue)
            self._queue.extend(records[:room])
            if room > 0:
                self._changed.notify()
            num_dropped = max(0, len(records) - room)
            is_closing = self._is_closing
        if num_dropped:
            reason = "closing" if is_closing else "queue_full"
            self._counts.add(f"traces_dropped_{reason}", num_dropped)

    def finish(self, limit_s: float) -> bool:
        """Accept no more records, and wait up to `limit_s` seconds for the thread to write the
        queued ones. Returns False if it did not finish."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Drop and count the queued records. Waits up to `_LAST_TRACE_S` seconds for the record
        that is being written."""
        with self._changed:
            self._has_given_up = True
            num_left = len(self._queue)
            self._queue.clear()
        self._counts.add("traces_dropped_closing", num_left)
        # Wait for the record that is being written, so that it is counted too.
        self._thread.join(_LAST_TRACE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closing:
                    self._changed.wait()
                if not self._queue or self._has_given_up:
                    return
                record = self._queue.popleft()
            self._write_one(record)

    def _write_one(self, record: RequestRecord) -> None:
        try:
            is_kept = self._write(record)
        # An error in the trace of one request must not affect the others.
        except Exception as error:
            self._counts.add("traces_dropped_unwritable", 1)
            self._log_unwritten(error)
        else:
            self._counts.add("traces_kept" if is_kept else "traces_sampled_out", 1)

    def _log_unwritten(self, error: Exception) -> None:
        """Log that a record was not written, at most once per `_LOG_PAUSE_S` seconds.

        The text of the error is left out, because it may quote the record.
        """
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _LOG_PAUSE_S
            logger.error("a trace could not be written: %s", type(error).__name__)


class OncePerMinute(logging.Filter):
    """Passes a line only if its message template was not passed in the last `PAUSE_S` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line to drop, and store the time of a line that passes."""
        kind = str(record.msg)
        if record.created < self._quiet_until_s.get(kind, 0.0):
            return False
        self._quiet_until_s[kind] = record.created + PAUSE_S
        return True


class MalformedHeaderFilter(logging.Filter):
    """Replaces the SDK's log line about a malformed header.

    The SDK's line quotes the header; the replacement names only the environment variable.
    """

    def __init__(self, variable: str) -> None:
        super().__init__()
        self._variable = variable

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the message, because it may contain the header; return True."""
        record.msg = "%s: what is not name=value in it is left out"
        record.args = (self._variable,)
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def limit_exporter_logs(environment: Mapping[str, str]) -> None:
    """Limit the log lines of the exporters: no headers, and each message at most once per minute.

    Call this before an exporter is created. `environment` has the environment variables with the
    headers.
    """
    headers = logging.getLogger(_HEADER_LOGGER)
    for known in [one for one in headers.filters if isinstance(one, MalformedHeaderFilter)]:
        headers.removeFilter(known)
    variable = next((name for name in _HEADER_VARIABLES if environment.get(name)), "headers")
    headers.addFilter(MalformedHeaderFilter(variable))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, OncePerMinute) for known in logger.filters):
            logger.addFilter(OncePerMinute())


class HashCachedResource(Resource):
    """A resource whose hash is computed once.

    The span encoder looks up the resource for each span. This is slow with the base class, because
    `Resource` converts itself to JSON for each hash.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash


def service_resource(package_version: str) -> Resource:
    """Return the OpenTelemetry resource with the name and version of the service.

    `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override them. The SDK adds its own
    attributes and a random instance id.
    """
    ours = {"service.name": SERVICE_NAME, "service.version": package_version}
    return HashCachedResource(Resource.create(ours).merge(OTELResourceDetector().detect()))


def package_version() -> str:
    """Return the version of the installed package; "0" if penstock is not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0"


def make_exporters(environment: Mapping[str, str]) -> tuple[SpanExporter, ...]:
    """Return the exporters that `OTEL_TRACES_EXPORTER` names, by default `otlp`. The name `none`
    means no exporter.

    Raises ValueError for an unknown protocol or exporter, and TypeError for an entry point that is
    not a span exporter.
    """
    names = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if names.lower() == "none":
        return ()
    parts = [_entry_point_name(part.strip(), environment) for part in names.split(",")]
    return tuple(_make(name, environment) for name in dict.fromkeys(parts))


def _entry_point_name(name: str, environment: Mapping[str, str]) -> str:
    if name.lower() != "otlp":
        return name
    variable = next((v for v in _PROTOCOL_VARIABLES if environment.get(v, "").strip()), "")
    protocol = environment[variable].strip() if variable else "grpc"
    if protocol not in _OTLP:
        raise ValueError(f"{variable} must be one of {', '.join(_OTLP)}, not {protocol!r}")
    return _OTLP[protocol]


def _make(name: str, environment: Mapping[str, str]) -> SpanExporter:
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ValueError(f"OTEL_TRACES_EXPORTER: no exporter {name!r} is installed")
    arguments: dict[str, Any] = {}
    is_timed = any(environment.get(variable, "").strip() for variable in _TIMEOUT_VARIABLES)
    if name in _OTLP.values() and not is_timed:
        arguments["timeout"] = DEFAULT_TIMEOUT_S
    exporter = found.load()(**arguments)
    if not isinstance(exporter, SpanExporter):
        raise TypeError(f"OTEL_TRACES_EXPORTER: {name!r} is not a span exporter")
    return exporter


class Tracing(ServiceListener):
    """Converts records of ended requests to traces and exports them, on background threads. All
    calls except `close` return immediately."""

    def __init__(
        self,
        provider: TracerProvider,
        processors: Sequence[BoundedSpanProcessor],
        worker: TraceWorker,
        counts: SpanCounts,
    ) -> None:
        self._provider = provider
        self._processors = tuple(processors)
        self._worker = worker
        self._counts = counts

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Queue ended requests. Each one becomes a trace, is not sampled, or is counted as lost."""
        self._worker.put(records)

    def counters(self) -> dict[str, int]:
        """Return the counts of traces and spans by outcome since the start; see
        `span_processor.NAMES`."""
        return self._counts.counts()

    def close(self, limit_s: float) -> None:
        """Write and export all pending traces. Blocks for at most `limit_s` seconds, or for
        `_LAST_TRACE_S` if that is longer.

        Traces and spans that were not exported by then are dropped and counted. Call this once.
        """
        deadline_s = time.monotonic() + limit_s
        worker_limit_s = max(0.0, limit_s - _ABORT_S)
        self._worker.finish(worker_limit_s)
        for processor in self._processors:
            processor.give_up()
        self._worker.give_up()
        # The SDK's shutdown has no time limit and waits for up to 30 seconds.
        shutdown = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        shutdown.start()
        shutdown.join(max(0.0, deadline_s - _ABORT_S - time.monotonic()))
        if shutdown.is_alive():
            for processor in self._processors:
                processor.exporter.shutdown()
            shutdown.join(max(0.0, deadline_s - time.monotonic()))
        if shutdown.is_alive():
            for processor in self._processors:
                processor.abandon()
        counts = self._counts.counts()
        logger.info(
            "traces and spans, from start to end: %s",
            ", ".join(f"{name} {num}" for name, num in counts.items() if num) or "none",
        )


def start_tracing(
    config: TracingConfig, *, model: str, environment: Mapping[str, str] | None = None
) -> Tracing:
    """Start tracing as configured by the `OTEL_*` variables. `model` is the name of the served
    model.

    `environment` has the variables that this module reads, by default the environment of the
    process. The SDK and the exporters always read the environment of the process. Raises
    ValueError, which names the variable, if one is invalid, and TypeError if an entry point is not
    an exporter or a sampler.
    """
    environment = os.environ if environment is None else environment
    check_numbers(environment)
    limit_exporter_logs(environment)
    counts = SpanCounts()
    ids = PlannedIds()
    queue_spans, batch_spans = max_queue_spans(environment), max_batch_spans(environment)
    exporters = make_exporters(environment)
    provider = TracerProvider(
        sampler=KeepSampler(sampler_from(environment)),
        resource=service_resource(package_version()),
        # At exit, the provider's shutdown may take 30 seconds; `close` replaces it.
        shutdown_on_exit=False,
        id_generator=ids,
    )
    processors = [
        BoundedSpanProcessor(exporter, queue_spans, counts, batch_spans) for exporter in exporters
    ]
    for processor in processors:
        provider.add_span_processor(processor)
    writer = SpanWriter(
        provider, ids, config, model=model, version=package_version(), clock=UnixClock()
    )
    worker = TraceWorker(writer.write, counts)
    worker.start()
    return Tracing(provider, processors, worker, counts)
