"""Routes the events of an engine step to the streams of their requests.

An error in the handling of the events of one request fails only that request. Never raises and
never blocks. A plain token (see `LiveOutput.is_plain`) wakes its writer at once; other writers are
woken after all events of the step are handled.
"""

import logging
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, Queued, StepEvents
from penstock.scheduler.request import FinishReason
from penstock.server.front.errors import INTERNAL, ErrorReason, Failure
from penstock.server.front.events import LogprobRows
from penstock.server.front.live_request import LiveRequest, LiveRequestOutput
from penstock.server.front.request_table import RequestTable
from penstock.server.front.watched_write import SharedWriter

logger = logging.getLogger(__name__)
STALLED = Failure(reason=ErrorReason.READER_STALLED)
LOG_INTERVAL_S = 1.0


@dataclass(slots=True)
class FrontCounters:
    """Counters of a front (gRPC server process) since its start; `observe/metrics/catalogue.py`
    describes them."""

    num_submitted: int = 0
    num_disconnected_readers: int = 0
    num_late_events: int = 0
    num_unknown_fields: int = 0
    num_lowered_priorities: int = 0
    num_internal_errors: int = 0


class EventRouter:
    """Routes each event to the request that it concerns.

    `cancel` cancels the outputs with the given keys in the engine. `on_late_event` receives
    admissions and ends of requests that this front has already removed. `newest_queue_position` is
    the queue position of the most recently queued request, even if the request was removed; None
    before the first one.
    """

    def __init__(
        self,
        table: RequestTable,
        counters: FrontCounters,
        *,
        max_backlog_tokens: int,
        cancel: Callable[[tuple[int, ...], FinishReason], None],
        on_late_event: Callable[[Admitted | Completed | Failed], None],
    ) -> None:
        self._table = table
        self._counters = counters
        self._max_backlog_tokens = max_backlog_tokens
        self._cancel = cancel
        self._on_late_event = on_late_event
        self._close_log = CloseLog(logger)
        self.newest_queue_position: Queued | None = None

    def dispatch(self, events: StepEvents, now_s: float, *, is_history: bool = False) -> None:
        """Apply the events of one step to their requests. This front received the events at
        `now_s`.

        If `is_history`, these are earlier events of a request that is being attached. The reader of
        this request has not started yet, and `newest_queue_position` stays unchanged.
        """
        touched: dict[LiveRequest, None] = {}
        newest = self.newest_queue_position
        self._changes(events, now_s, touched)
        self._prompt_logprobs(events, now_s, touched)
        self._tokens(events, now_s, touched)
        self._ends(events, now_s, touched)
        if events.changes:
            for request in touched:
                request.report_queue_position()
        if is_history:
            self.newest_queue_position = newest
        for request in touched:
            num_unread = request.stream.num_backlog_tokens
            if num_unread > self._max_backlog_tokens and not request.is_backlog_unlimited:
                self.disconnect(request, f"{num_unread} tokens unread", now_s)
            request.stream.wake()

    def disconnect(self, request: LiveRequest, why: str, now_s: float) -> None:
        """Disconnect a stalled reader, and cancel its request unless the request is resumable."""
        extra = {"request_id": request.request_id, "trace_id": request.trace_id.hex()}
        self._close_log.report(now_s, f"request {request.request_id}", why, extra)
        self._counters.num_disconnected_readers += 1
        request.phases.stop(now_s)
        request.stream.abort(STALLED)
        if request.generation.resumption is None:
            self._cancel(request.live_keys, FinishReason.CANCELLED)

    def disconnect_shared(self, writer: SharedWriter[Any], why: str, now_s: float) -> None:
        """Disconnect the stalled reader of several requests. The owner of the writer releases the
        requests (`Front.release_all`)."""
        self._close_log.report(now_s, "a shared stream", why, {})
        self._counters.num_disconnected_readers += 1
        writer.abort(STALLED)

    def disconnect_stalled(
        self, writers: Iterable[SharedWriter[Any]], max_stall_s: float, now_s: float
    ) -> None:
        """Disconnect each reader whose current write has been blocked for longer than
        `max_stall_s`.

        Call this periodically.
        """
        for request in self._table:
            stalled_s = now_s - request.stream.blocked_since_s
            if stalled_s > max_stall_s and not request.stream.is_aborted:
                self.disconnect(request, f"one write blocked for {stalled_s:.1f} s", now_s)
        for writer in writers:
            stalled_s = now_s - writer.blocked_since_s
            if stalled_s > max_stall_s and not writer.is_aborted:
                self.disconnect_shared(writer, f"one write blocked for {stalled_s:.1f} s", now_s)
        self._close_log.report_remaining(now_s)

    def _find(self, key: int, touched: dict[LiveRequest, None]) -> "LiveRequestOutput | None":
        output = self._table.output(key)
        if output is None:
            # This front released the request while the events were in transit; this is expected and
            # counted.
            self._counters.num_late_events += 1
            return None
        touched[output.request] = None
        return output

    def _changes(self, events: StepEvents, now_s: float, touched: dict[LiveRequest, None]) -> None:
        for change in events.changes:
            if isinstance(change, Queued):
                self.newest_queue_position = change
            output = self._find(change.key, touched)
            if output is None:
                if isinstance(change, Admitted):
                    self._on_late_event(change)
                continue
            try:
                if isinstance(change, Queued):
                    output.request.on_queued(output, change)
                elif isinstance(change, Admitted):
                    output.request.on_admitted(output, change)
                elif isinstance(change, Preempted):
                    output.request.on_preempted(output, change)
                else:
                    output.request.on_prefix_found(output, change)
            except Exception as error:
                self._fail_internal(output.request, error, now_s)

    def _prompt_logprobs(
        self, events: StepEvents, now_s: float, touched: dict[LiveRequest, None]
    ) -> None:
        for key, first_position, logprobs in events.prompt_logprobs:
            output = self._find(key, touched)
            if output is None:
                continue
            try:
                output.request.on_prompt_logprobs(first_position, logprobs)
            except Exception as error:
                self._fail_internal(output.request, error, now_s)

    def _tokens(self, events: StepEvents, now_s: float, touched: dict[LiveRequest, None]) -> None:
        keys: list[int] = events.keys.tolist()
        token_ids: list[int] = events.tokens.tolist()
        rows = LogprobRows(events.logprobs)
        at_s = events.at_s
        stopped: list[int] = []
        find, max_backlog_tokens = self._table.find_output, self._max_backlog_tokens
        for row, (key, token_id) in enumerate(zip(keys, token_ids, strict=True)):
            output = find(key)
            if output is None:
                self._counters.num_late_events += 1
                continue
            try:
                if output.is_plain:
                    # Nearly all tokens take this path. Cache misses are most of its cost, so no
                    # other part of the request is accessed.
                    output.token_ids.append(token_id)
                    stream = output.stream
                    stream.push_text(output.text.push_one(token_id))
                    stream.wake()
                    if stream.num_backlog_tokens > max_backlog_tokens:
                        touched[output.request] = None
                    continue
                touched[output.request] = None
                if output.request.on_token(
                    output, token_id, at_s=at_s, now_s=now_s, rows=rows, row=row
                ):
                    stopped.append(key)
            except Exception as error:
                self._fail_internal(output.request, error, now_s)
        if stopped:
            self._cancel(tuple(stopped), FinishReason.STOP)

    def _ends(self, events: StepEvents, now_s: float, touched: dict[LiveRequest, None]) -> None:
        for end in events.ends:
            output = self._find(end.key, touched)
            if output is None:
                self._on_late_event(end)
                continue
            try:
                if isinstance(end, Failed):
                    output.request.on_failed(output, end)
                else:
                    output.request.on_completed(output, end, now_s)
            except Exception as error:
                self._fail_internal(output.request, error, now_s)

    def _fail_internal(self, request: LiveRequest, error: Exception, now_s: float) -> None:
        """Fail a request after an error in this code, without affecting other requests."""
        self._counters.num_internal_errors += 1
        # Log only the frames: the text of an exception may quote a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        logger.error(
            "request failed here with %s\n%s",
            type(error).__name__,
            frames,
            extra={"request_id": request.request_id, "trace_id": request.trace_id.hex()},
        )
        # Its later events must not fail again, and the engine must not continue to generate without
        # a reader.
        live_keys = request.live_keys
        for output in request.outputs:
            output.is_live = output.is_plain = False
        self._cancel(live_keys, FinishReason.CANCELLED)
        request.fail(INTERNAL, now_s)


class CloseLog:
    """Logs each disconnected stalled reader, as a warning for at most one reader per second.

    Further disconnects are logged at debug level, and their number is logged in a later warning.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last_s = -math.inf
        self._num_unreported: int = 0

    def report(self, now_s: float, reader: str, why: str, extra: dict[str, str]) -> None:
        """Log a disconnected reader: at debug level if the last warning is less than
        `LOG_INTERVAL_S` ago, otherwise as a warning.

        `now_s` is monotonic time in seconds and must not decrease.
        """
        if now_s < self._last_s + LOG_INTERVAL_S:
            self._num_unreported += 1
            self._logger.debug("%s: stalled reader disconnected: %s", reader, why, extra=extra)
            return
        self.report_remaining(now_s)
        self._last_s = now_s
        self._logger.warning("%s: stalled reader disconnected: %s", reader, why, extra=extra)

    def report_remaining(self, now_s: float) -> None:
        """Log how many further stalled readers were disconnected, if there were any and if
        `LOG_INTERVAL_S` has passed since the last warning."""
        if self._num_unreported and now_s >= self._last_s + LOG_INTERVAL_S:
            self._logger.warning(
                "%d more stalled readers disconnected in the last %.1f s",
                self._num_unreported,
                now_s - self._last_s,
            )
            self._num_unreported = 0
