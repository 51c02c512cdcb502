"""The thread that writes traces, and its bounded queue.

The observer's event loop hands records over and never waits: what finds the queue full is dropped
and counted. Knows records and a writer; no OpenTelemetry.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.span_processor import SpanCounts

MAX_QUEUED_RECORDS = 4096
_COMPLAINT_PAUSE_S = 60.0
_LAST_TRACE_S = 0.2

_logger = logging.getLogger(__name__)


class TraceWorker:
    """Runs `write` for each record, in order, on a separate thread."""

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
        """Start; records queued before are written now."""
        self._thread.start()

    def put(self, records: Sequence[RequestRecord]) -> None:
        """Queue them, as far as they fit."""
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
        """Accept no more, write those queued; False if that took longer than `limit_s`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Drop the queued records."""
        with self._changed:
            self._has_given_up = True
            num_left = len(self._queue)
            self._queue.clear()
        self._counts.add("traces_dropped_closing", num_left)
        # The one in hand is counted too.
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
        except Exception as error:  # one request's trace must not cost those of all others
            self._counts.add("traces_dropped_unwritable", 1)
            self._complain(error)
        else:
            self._counts.add("traces_kept" if is_kept else "traces_sampled_out", 1)

    def _complain(self, error: Exception) -> None:
        """Log at intervals, without the error's text, which may quote the record."""
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + _COMPLAINT_PAUSE_S
            _logger.error("a trace could not be written: %s", type(error).__name__)
