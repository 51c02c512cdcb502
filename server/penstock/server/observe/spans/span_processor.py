"""The SDK's batch span processor, with a count of all dropped spans.

When its queue is full, the SDK silently drops the oldest spans. Here a thread that ends a span
waits for a free place in the queue instead; `export.TraceWorker` drops and counts the records that
do not fit meanwhile. The exporter is wrapped, because the processor does not report the results of
exports.
"""

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

NAMES: tuple[str, ...] = (
    "traces_kept",
    "traces_sampled_out",
    "traces_dropped_queue_full",
    "traces_dropped_closing",
    "traces_dropped_unwritable",
    "spans_exported",
    "spans_dropped_export",
    "spans_dropped_closing",
)
"""Names of all counts, which never decrease. `_dropped_` is followed by the reason."""


class SpanCounts:
    """Counts of traces and spans by outcome. Thread-safe. All names exist from the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, name: str, num: int) -> None:
        """Increase a count. Raises KeyError for a name that is not in `NAMES`."""
        with self._lock:
            self._counts[name] += num

    def counts(self) -> dict[str, int]:
        """Return all counts, read atomically."""
        with self._lock:
            return dict(self._counts)


class QueueSlots:
    """Counts the spans that are queued or being exported, and limits the queued ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_in = 0
        self._num_under_way = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_abandoned = False

    def acquire(self) -> bool:
        """Take a place in the queue for one span; wait while the queue is full. Returns False after
        `close`."""
        with self._changed:
            while self._num_in >= self._size and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return False
            self._num_in += 1
            return True

    def start_export(self, num: int) -> bool:
        """Move `num` spans from the queue to the exporter. Returns False if they were abandoned."""
        with self._changed:
            self._num_in -= num
            self._num_under_way += num
            self._changed.notify_all()
            return not self._is_abandoned

    def end_export(self, num: int) -> bool:
        """Record the end of an export of `num` spans. Returns False if they were abandoned."""
        with self._changed:
            self._num_under_way -= num
            return not self._is_abandoned

    def abandon(self) -> int:
        """Make `start_export` and `end_export` return False from now on. Return the number of spans
        that are queued or being exported."""
        with self._changed:
            self._is_abandoned = True
            return self._num_in + self._num_under_way

    def close(self) -> None:
        """Make `acquire` return False from now on, also in threads that are waiting in it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class CountingExporter(SpanExporter):
    """An exporter that counts the results of exports, and is shut down at most once."""

    def __init__(self, inner: SpanExporter, slots: QueueSlots, counts: SpanCounts) -> None:
        self._inner = inner
        self._slots = slots
        self._counts = counts
        self._lock = threading.Lock()
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans that were removed from the queue of the processor, and count the result.

        After `QueueSlots.abandon`, exports nothing and returns FAILURE; the spans are then counted
        by the caller of `abandon`.
        """
        if not self._slots.start_export(len(spans)):
            return SpanExportResult.FAILURE
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if self._slots.end_export(len(spans)):
                is_out = result is SpanExportResult.SUCCESS
                self._counts.add("spans_exported" if is_out else "spans_dropped_export", len(spans))
        return result

    def shutdown(self) -> None:
        """Shut down the wrapped exporter. If this aborts a running export, the spans of that export
        are counted as dropped. Idempotent."""
        with self._lock:
            is_first, self._is_shut = not self._is_shut, True
        if is_first:
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the wrapped exporter; this exporter buffers nothing."""
        return self._inner.force_flush(timeout_millis)


class BoundedSpanProcessor(BatchSpanProcessor):
    """A batch span processor whose `on_end` blocks while the queue is full, instead of dropping
    spans.

    The queue holds `max_queue_size` spans. At most `max_batch_size` spans are exported at a time
    (None: the value of `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`, or the SDK's default). Other settings come
    from the `OTEL_BSP_*` variables.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        max_queue_size: int,
        counts: SpanCounts,
        max_batch_size: int | None = None,
    ) -> None:
        self._slots = QueueSlots(max_queue_size)
        self._counts = counts
        self.exporter = CountingExporter(exporter, self._slots, counts)
        super().__init__(
            self.exporter, max_queue_size=max_queue_size, max_export_batch_size=max_batch_size
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span; wait while the queue is full. After `give_up`, drop and count
        it."""
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        if self._slots.acquire():
            super().on_end(span)
        else:
            self._counts.add("spans_dropped_closing", 1)

    def give_up(self) -> None:
        """Drop and count all spans that end from now on, and the spans of threads that are waiting
        for a place in the queue."""
        self._slots.close()

    def abandon(self) -> None:
        """Count the spans that are queued or being exported as dropped, and export no more
        spans."""
        self._counts.add("spans_dropped_closing", self._slots.abandon())
