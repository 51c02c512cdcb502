"""Collects the data for the record (`RequestRecord`) of each request, from its arrival to its end.

An account (`RequestAccount`) has the outcome of one request, and the data that exist before the
front (gRPC server process) has opened the request. Each request gets at most one record, and none
if records are disabled. An error while a record is created never fails the request. The RPC handler
of a request opens the account on arrival and closes it at the end; closing it again has no effect.
Does not use gRPC: the caller passes the status code. All calls happen on one event loop. Times are
in seconds on the engine's clock.
"""

import logging
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.scheduler.events import Admitted, Completed, Failed
from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Failure
from penstock.server.front.live_output import captured_prompt
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.phases import PREPARE
from penstock.server.front.watched_write import WatchedWrite
from penstock.server.observe.request_record import (
    Content,
    RequestOptions,
    RequestRecord,
    RequestRecorder,
    Segment,
    TraceParent,
)
from penstock.server.observe.trace_context import NOT_TRACED, RemoteParent, TraceIds
from penstock.server.tenants import NO_CEILINGS, PriorityCeilings

logger = logging.getLogger(__name__)
MAX_WAITING: Final = 1024
"""Maximum number of records that wait for the engine's end event. Beyond it the oldest record is
written early."""
MAX_WAIT_S: Final = 1.0


_NO_OPTIONS = RequestOptions()
_Numbers: TypeAlias = tuple[int, int, int, float, int, float, int]
"""The fields `num_prompt_tokens` to `num_preemptions` of a `RequestRecord`, in order."""
_NO_NUMBERS: _Numbers = (0, 0, 0, math.nan, -1, math.nan, 0)
_NO_REASONS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request: a gRPC status code, and the name of the ErrorReason, empty if there
    is none."""

    code: int
    reason: str = ""


@dataclass(slots=True, eq=False)
class RequestAccount:
    """The data for the record of one request, without the data in `request`.

    Attributes:
        call_timeout_s: Time from the arrival of the call to its deadline, in seconds; infinite
            without a deadline.
        ceilings: The maximum priorities of its tenant.
        request: The request in the front; None until the front has registered it.
        failure: The error returned to the caller; None while there is none.
        shared: The writer that sends the messages of several requests together; None if this
            request does not use one.
        shared_stalls: `WatchedWrite.stalls` of the shared writer at the arrival of this request.
        num_messages: Number of messages of this request that `request.stream.num_writes` does not
            count: messages sent by a shared writer, and the response of a unary call.
        outcome, end_s: Outcome and end time of the request; None and NaN until the account is
            closed.
        stalled_s, num_stalls: Set when the account is closed; see `WatchedWrite.stalls`.
    """

    method: str
    peer: str
    arrival_s: float
    trace: TraceParent
    call_timeout_s: float = math.inf
    tenant: str = ""
    ceilings: PriorityCeilings = NO_CEILINGS
    model: str = ""
    request_id: str = ""
    options: RequestOptions = _NO_OPTIONS
    request: LiveRequest | None = None
    failure: Failure | None = None
    shared: WatchedWrite | None = None
    shared_stalls: tuple[float, int] = (0.0, 0)
    num_messages: int = 0
    outcome: Outcome | None = None
    end_s: float = math.nan
    stalled_s: float = 0.0
    num_stalls: int = 0

    def share(self, writer: WatchedWrite) -> None:
        """Record that `writer` sends the messages of this request together with messages of other
        requests."""
        self.shared = writer
        self.shared_stalls = writer.stalls(self.arrival_s)

    def set_outcome(self, outcome: Outcome, now_s: float) -> None:
        """Set the outcome, the end time and the stalls, because the request has ended for its
        caller."""
        self.outcome = outcome
        self.end_s = now_s if now_s > self.arrival_s else self.arrival_s
        if self.request is not None:
            self.stalled_s, self.num_stalls = self.request.stream.stalls(now_s)
        if self.shared is not None:
            stalled_s, num_stalls = self.shared.stalls(now_s)
            self.stalled_s += max(0.0, stalled_s - self.shared_stalls[0])
            self.num_stalls += max(0, num_stalls - self.shared_stalls[1])

    def record(self, *, sequence: int, front_id: int, has_content: bool) -> RequestRecord:
        """Return the record of the request. The request must have ended (see `set_outcome`).

        `sequence` is the number of the record in this front. If `has_content`, the record includes
        the start of the prompt and of each output.
        """
        request, outcome = self.request, self.outcome or _NO_OUTCOME
        if request is None:
            request_id, end_s, finish_reasons = self.request_id, self.end_s, _NO_REASONS
            numbers, num_writes, content = _NO_NUMBERS, 0, None
            segments: tuple[Segment, ...] = (Segment(PREPARE, self.arrival_s, end_s),)
        else:
            request_id, finish_reasons = request.request_id, request.finish_reasons
            numbers, num_writes = _numbers_of(request), request.stream.num_writes
            # The engine's timestamps may be slightly later than those of this process.
            end_s = max(self.end_s, request.phases.segments[-1].start_s)
            segments = request.phases.segments_until(end_s, num_tokens=numbers[2])
            content = _content_of(request) if has_content else None
        return RequestRecord(
            sequence,
            front_id,
            request_id,
            self.method,
            self.model,
            self.tenant,
            self.peer,
            self.trace,
            self.arrival_s,
            end_s,
            outcome.code,
            outcome.reason,
            finish_reasons,
            self.options,
            segments,
            *numbers,
            self.num_messages + num_writes,
            self.stalled_s,
            self.num_stalls,
            0 if request is None else request.num_replays,
            content,
        )


_NO_OUTCOME = Outcome(code=0)


def _numbers_of(request: LiveRequest) -> _Numbers:
    num_output_tokens = num_preemptions = 0
    for output in request.outputs:
        num_output_tokens += output.text.num_tokens
        num_preemptions += output.num_preemptions
    position = request.head.queue_position
    estimated_queue_s = None if position is None else position.estimated_queue_s
    has_token = request.first_token_s != NO_TIME
    return (
        request.num_prompt_tokens,
        request.num_cached_tokens,
        num_output_tokens,
        max(0.0, request.first_token_s - request.arrival_s) if has_token else math.nan,
        -1 if position is None else position.num_ahead,
        math.nan if estimated_queue_s is None else estimated_queue_s,
        num_preemptions,
    )


def _content_of(request: LiveRequest) -> Content:
    outputs = (output.captured for output in request.outputs)
    return Content(
        captured_prompt(request.generation),
        tuple(captured.text for captured in outputs if captured is not None),
    )


class Accounts:
    """Opens accounts, and passes the record of each closed account to `recorder`.

    Without a recorder nothing is recorded. If `is_tracing`, requests get trace ids. If
    `has_content`, records include the start of the prompt and of each output.
    """

    def __init__(
        self,
        recorder: RequestRecorder | None,
        *,
        is_tracing: bool,
        front_id: int,
        has_content: bool,
    ) -> None:
        self.is_tracing = is_tracing
        self.has_content = has_content and recorder is not None
        self._recorder = recorder
        self._front_id = front_id
        self._ids = TraceIds()
        self._pending = PendingRecords(self._record)

    @property
    def is_enabled(self) -> bool:
        """True if requests are recorded, i.e. if a recorder is configured."""
        return self._recorder is not None

    def open(
        self, method: str, *, arrival_s: float, peer: str = "", parent: RemoteParent | None = None
    ) -> RequestAccount:
        """Return a new account for a request that has just arrived. `parent` is the remote parent
        span, or None."""
        trace = self._ids.new_trace_parent(parent) if self.is_tracing else NOT_TRACED
        return RequestAccount(method, peer, arrival_s, trace)

    def close(
        self, account: RequestAccount, outcome: Outcome, now_s: float, *, is_engine_up: bool
    ) -> None:
        """Close the account. Only the first call has an effect.

        Creates the record immediately if no engine is connected, if the request was not submitted,
        or if the engine has ended it. Otherwise the record is created when the engine's end event
        arrives, or in `sweep` or `flush`.
        """
        if self._recorder is None or account.outcome is not None:
            return
        account.set_outcome(outcome, now_s)
        request = account.request
        if is_engine_up and request is not None and not request.has_engine_end and request.specs:
            self._pending.hold(request.specs[0].key, account)
        else:
            self._record(account)

    def on_late_event(self, event: Admitted | Completed | Failed) -> None:
        """Add the details of an engine event to the waiting record of a request that this front has
        already removed. An end event also writes the record. Ignored if no record waits."""
        if isinstance(event, Admitted):
            self._pending.on_admitted(event)
        else:
            self._pending.on_end(event)

    def sweep(self, now_s: float) -> None:
        """Write the records that have waited `MAX_WAIT_S` for their end event.

        Call this about once per second.
        """
        self._pending.flush(now_s - MAX_WAIT_S)

    def flush(self) -> None:
        """Write all waiting records. Call this when no more events of the engine will arrive."""
        self._pending.flush(float("inf"))

    def _record(self, account: RequestAccount) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        sequence = recorder.num_records
        try:
            recorder.note(
                account.record(
                    sequence=sequence, front_id=self._front_id, has_content=self.has_content
                )
            )
        except Exception as error:
            # An error here must not affect the request, which has been answered.
            if recorder.num_records == sequence:
                outcome = account.outcome or Outcome(code=0)
                recorder.note_unreadable(account.method, outcome.code, outcome.reason)
            # Log only the frames: the text of an exception may quote a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a record could not be created: %s\n%s", type(error).__name__, frames)  # noqa: TRY400


class PendingRecords:
    """Accounts of requests that have ended for their callers and wait for the engine's end event.

    They are indexed by the key of the first output (its number in the engine). Each account is
    passed to `record` exactly once.
    """

    def __init__(self, record: Callable[[RequestAccount], None]) -> None:
        self._record = record
        self._waiting: dict[int, RequestAccount] = {}

    def hold(self, key: int, account: RequestAccount) -> None:
        """Keep `account` until the output `key` has ended in the engine or until `flush`, and then
        record it.

        If more than MAX_WAITING accounts wait, the oldest is recorded immediately.
        """
        self._waiting[key] = account
        if len(self._waiting) > MAX_WAITING:
            self._record(self._waiting.pop(next(iter(self._waiting))))

    def on_admitted(self, change: Admitted) -> None:
        """Add the details of the queue wait to a waiting record.

        A removed request may still be admitted before its cancellation reaches the engine. The end
        event then describes only the time in the batch.
        """
        account = self._waiting.get(change.key)
        if account is not None and account.request is not None:
            account.request.phases.add_details(wait=change.wait)

    def on_end(self, end: Completed | Failed) -> None:
        """Write the waiting record of the request that has now ended in the engine. Ignores
        requests without a waiting record."""
        account = self._waiting.pop(end.key, None)
        if account is None:
            return
        if account.request is not None:
            account.request.phases.add_details(wait=end.wait, residency=end.residency)
        self._record(account)

    def flush(self, oldest_s: float) -> None:
        """Record all requests that ended for their callers before `oldest_s`."""
        while self._waiting:
            key, account = next(iter(self._waiting.items()))
            if account.end_s >= oldest_s:
                return
            del self._waiting[key]
            self._record(account)
