"""Converts records to SDK spans: a root span named after the RPC, and a child span per segment.

Builds the tree, its ids, times and events; `attributes.py` provides the attributes. Ids are set
before spans are created: the id of the root comes with the request, and the ids of children are
derived from it. Uses no threads and no queues. The sampler receives the attributes that are known
at the start of a request; only traces that it keeps are written.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord, SegmentKind, TraceParent
from penstock.server.observe.spans.attributes import (
    end_attributes,
    segment_attributes,
    start_attributes,
)
from penstock.server.observe.spans.keys import (
    PREEMPTED_EVENT,
    REPLAYED_EVENT,
    SAMPLING_REASON,
    SCHEMA_URL,
)
from penstock.server.observe.spans.sampler import reason_to_keep
from penstock.server.observe.status_codes import is_server_error

SCOPE_NAME = "penstock"
MAX_CHILDREN = 120
"""Maximum number of child spans of a trace. If a request has more segments, the middle ones are
left out."""

_ID_MASK = (1 << 64) - 1
_ID_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio. It is odd, so its multiples all differ modulo 2**64."""
_IN_BATCH = (SegmentKind.PREFILL, SegmentKind.DECODE)
_MAX_AGE_NS = 1_000_000_000
_NUM_READINGS = 3
_STATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_*/-]{0,240}(@[a-z][a-z0-9_*/-]{0,13})?"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_STATE_MEMBERS = 32


class PlannedIds(IdGenerator):
    """An id generator whose next ids are set in advance.

    Used only by the thread that creates the provider's spans.
    """

    def __init__(self) -> None:
        self._trace_id = 0
        self._span_id = 0

    def plan(self, trace_id: int, span_id: int) -> None:
        """Set the id of the next span, and its trace id. The trace id is used only if the span has
        no parent."""
        self._trace_id = trace_id
        self._span_id = span_id

    def generate_trace_id(self) -> int:
        """Return the trace id that `plan` set for the next span."""
        return self._trace_id

    def generate_span_id(self) -> int:
        """Return the id that `plan` set for the next span."""
        return self._span_id

    def is_trace_id_random(self) -> bool:
        """Return True, because ids of new traces come from the system's random generator."""
        return True


class UnixClock:
    """Measures the offset between monotonic and Unix time. Not thread-safe.

    The offset is measured again when it is a second old, because Unix time may be corrected. All
    spans of one trace use one offset, so that a correction does not change the intervals between
    them.
    """

    def __init__(
        self,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns
        self._measured_ns: int | None = None
        self._offset_ns = 0

    def offset_ns(self) -> int:
        """Return Unix time minus monotonic time in nanoseconds, at most a second old."""
        now_ns = self._monotonic_ns()
        if self._measured_ns is None or now_ns - self._measured_ns > _MAX_AGE_NS:
            self._offset_ns = self._measure()
            self._measured_ns = now_ns
        return self._offset_ns

    def _measure(self) -> int:
        """Read both clocks a few times. Return the offset of the fastest reading, because it is the
        most accurate."""
        readings: list[tuple[int, int]] = []
        for _ in range(_NUM_READINGS):
            before_ns = self._monotonic_ns()
            unix_ns = self._unix_ns()
            after_ns = self._monotonic_ns()
            readings.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
        return min(readings)[1]


def to_unix_ns(at_s: float, offset_ns: int) -> int:
    """Convert a time of the monotonic clock to nanoseconds since 1970."""
    return round(at_s * 1e9) + offset_ns


class SpanWriter:
    """Writes the traces of ended requests as spans of `provider`. `ids` is the id generator of
    `provider`. Not thread-safe. `model` is the name of the served model."""

    def __init__(
        self,
        provider: TracerProvider,
        ids: PlannedIds,
        config: TracingConfig,
        *,
        model: str,
        version: str,
        clock: UnixClock,
    ) -> None:
        self._tracer = provider.get_tracer(SCOPE_NAME, version, SCHEMA_URL)
        self._ids = ids
        self._config = config
        self._model = model
        self._clock = clock

    def write(self, record: RequestRecord) -> bool:
        """Write the trace of one request. Returns False if the sampler dropped it, or if the record
        has no trace ids."""
        trace = record.trace
        if not (trace.trace_id and trace.span_id):
            return False
        offset_ns = self._clock.offset_ns()
        attributes = start_attributes(record)
        reason = reason_to_keep(record, self._config)
        if reason is not None:
            attributes[SAMPLING_REASON] = reason.value
        self._ids.plan(int.from_bytes(trace.trace_id, "big"), int.from_bytes(trace.span_id, "big"))
        root = self._tracer.start_span(
            record.method,
            context=_remote_parent(trace),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=to_unix_ns(record.arrival_s, offset_ns),
        )
        if not root.is_recording():
            return False
        # Children first, because the trace is complete when its root ends.
        if isinstance(root, ReadableSpan):
            self._write_children(root, record, offset_ns)
        root.set_attributes(end_attributes(record, self._config, model=self._model))
        for name, at_s in _events(record):
            root.add_event(name, timestamp=to_unix_ns(at_s, offset_ns))
        if is_server_error(record.code):
            root.set_status(StatusCode.ERROR)
        root.end(to_unix_ns(record.end_s, offset_ns))
        return True

    def _write_children(self, root: ReadableSpan, record: RequestRecord, offset_ns: int) -> None:
        """Write the children as ended spans, because the SDK's start and end take several times as
        long."""
        parent = root.get_span_context()
        assert parent is not None
        root_id = parent.span_id
        # The tracer of a disabled SDK has no processor, and its spans are not recorded.
        on_end: Callable[[ReadableSpan], None] = cast(Any, self._tracer).span_processor.on_end
        for index in _kept_indices(len(record.segments)):
            segment = record.segments[index]
            span = ReadableSpan(
                segment.kind.value,
                context=SpanContext(
                    parent.trace_id,
                    _child_id(root_id, index),
                    is_remote=False,
                    trace_flags=parent.trace_flags,
                    trace_state=parent.trace_state,
                ),
                parent=parent,
                resource=root.resource,
                attributes=segment_attributes(record, index),
                start_time=to_unix_ns(segment.start_s, offset_ns),
                end_time=to_unix_ns(segment.end_s, offset_ns),
                instrumentation_scope=root.instrumentation_scope,
            )
            on_end(span)


def _kept_indices(num_segments: int) -> Iterable[int]:
    if num_segments <= MAX_CHILDREN:
        return range(num_segments)
    half = MAX_CHILDREN // 2
    return (*range(half), *range(num_segments - half, num_segments))


def _child_id(root_id: int, index: int) -> int:
    """Return the span id of child `index`. It is derived from the id of the root, differs from the
    ids of the other children and is never 0."""
    return (root_id + (index + 1) * _ID_STEP) & _ID_MASK or (root_id - _ID_STEP) & _ID_MASK


def _events(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """Yield the name and the time (seconds, monotonic clock) of each preemption and each replay.

    After both, the request waits in the queue again. An engine that preempts a request reports its
    residency in the batch; an engine that died does not.
    """
    for before, after in pairwise(record.segments):
        if after.kind is not SegmentKind.QUEUE:
            continue
        if after.is_engine_lost:
            yield REPLAYED_EVENT, after.start_s
        elif before.kind in _IN_BATCH:
            # The next engine may have been ready at once.
            is_replay = before.residency is None and record.num_replays > 0
            name = REPLAYED_EVENT if is_replay else PREEMPTED_EVENT
            yield name, after.start_s


def _remote_parent(trace: TraceParent) -> Context:
    """Return a context with the caller's span as the parent; an empty context if the caller sent no
    trace context.
    """
    if not trace.parent_span_id:
        return Context()
    flags = TraceFlags.SAMPLED if trace.is_parent_sampled else TraceFlags.DEFAULT
    parent = SpanContext(
        int.from_bytes(trace.trace_id, "big"),
        int.from_bytes(trace.parent_span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(flags),
        trace_state=_trace_state(trace.trace_state),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


@lru_cache(maxsize=256)
def _trace_state(text: str) -> TraceState:
    """Return the caller's trace state; an empty one if a part of it is malformed, as W3C Trace
    Context allows.

    It is checked here, because the SDK would write a malformed member to the log.
    """
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    if len(members) > _MAX_STATE_MEMBERS or not all(map(_STATE_MEMBER.fullmatch, members)):
        return TraceState()
    pairs = dict(member.split("=", 1) for member in members)
    return TraceState(list(pairs.items())) if len(pairs) == len(members) else TraceState()
