"""The SDK's batch span processor, with a count of every dropped span.

The SDK's queue silently drops its oldest spans when it is full. So a thread that ends a span waits
here for room in the queue; records that do not fit are dropped and counted where they are received.
The exporter is wrapped, because the processor does not report the results of exports.
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
    """Counts of spans; every name exists from the start."""

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
    """Counts the spans that are queued or being exported, and waits for room in the queue."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_in = 0
        self._num_under_way = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_abandoned = False

    def enter(self) -> bool:
        """Take a place, waiting for one; return False once closed."""
        with self._changed:
            while self._num_in >= self._size and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return False
            self._num_in += 1
            return True

    def leave(self, num: int) -> bool:
        """Move `num` spans from the queue to the exporter; return False if they were abandoned."""
        with self._changed:
            self._num_in -= num
            self._num_under_way += num
            self._changed.notify_all()
            return not self._is_abandoned

    def arrive(self, num: int) -> bool:
        """Record the end of an export of `num` spans; return False if they were abandoned."""
        with self._changed:
            self._num_under_way -= num
            return not self._is_abandoned

    def abandon(self) -> int:
        """Return the number of queued and exporting spans; their outcome is no longer counted."""
        with self._changed:
            self._is_abandoned = True
            return self._num_in + self._num_under_way

    def close(self) -> None:
        """Stop waiting: release blocked threads, and block none from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class WatchedExporter(SpanExporter):
    """An exporter that counts the results of exports, and is shut down at most once."""

    def __init__(self, inner: SpanExporter, slots: QueueSlots, counts: SpanCounts) -> None:
        self._inner = inner
        self._slots = slots
        self._counts = counts
        self._lock = threading.Lock()
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans, which have left the processor's queue."""
        if not self._slots.leave(len(spans)):
            return SpanExportResult.FAILURE
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if self._slots.arrive(len(spans)):
                is_out = result is SpanExportResult.SUCCESS
                self._counts.add("spans_exported" if is_out else "spans_dropped_export", len(spans))
        return result

    def shutdown(self) -> None:
        """Shut down the inner exporter, which may abort a running export as failed."""
        with self._lock:
            is_first, self._is_shut = not self._is_shut, True
        if is_first:
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the inner exporter; nothing is buffered here."""
        return self._inner.force_flush(timeout_millis)


class BoundedSpanProcessor(BatchSpanProcessor):
    """A batch processor that makes the thread that ends a span wait while its queue is full.

    `max_queue_size` spans, exported at most `max_batch_size` at a time (None: the variable's or the
    SDK's default); the other settings are those of the `OTEL_BSP_*` variables.
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
        self.exporter = WatchedExporter(exporter, self._slots, counts)
        super().__init__(
            self.exporter, max_queue_size=max_queue_size, max_export_batch_size=max_batch_size
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span once the queue has room."""
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        if self._slots.enter():
            super().on_end(span)
        else:
            self._counts.add("spans_dropped_closing", 1)

    def give_up(self) -> None:
        """From now on drop spans instead of waiting for room in the queue."""
        self._slots.close()

    def abandon(self) -> None:
        """Count spans not yet exported as lost, and export nothing more."""
        self._counts.add("spans_dropped_closing", self._slots.abandon())
