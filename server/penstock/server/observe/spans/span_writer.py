"""Plans become spans of the SDK: with their own ids, their own times and the caller's context.

Knows no thread and no queue. The sampler is asked with what was known at a request's start; only
what it keeps is planned out.
"""

import re
from functools import lru_cache

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord, TraceParent
from penstock.server.observe.spans.clock import UnixClock, to_unix_ns
from penstock.server.observe.spans.ids import PlannedIds
from penstock.server.observe.spans.keep import reason_to_keep
from penstock.server.observe.spans.keys import SAMPLING_REASON, SCHEMA_URL
from penstock.server.observe.spans.plan import PlanOptions, plan_trace
from penstock.server.observe.spans.root_attributes import start_attributes
from penstock.server.observe.spans.span_plan import SpanPlan

SCOPE_NAME = "penstock"

_STATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_*/-]{0,240}(@[a-z][a-z0-9_*/-]{0,13})?"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_STATE_MEMBERS = 32


class SpanWriter:
    """Writes traces to a provider whose ids are `ids`. For one thread."""

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
        self._clock = clock
        self._options = PlanOptions(
            model=model,
            has_content=config.has_content,
            has_next_rpc_keys=config.has_next_rpc_keys,
        )

    def write(self, record: RequestRecord) -> bool:
        """Write the trace of one request; False if it was not sampled, or is not traced at all."""
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
        self._fill(root, plan_trace(record, self._options), offset_ns)
        return True

    def _fill(self, root: Span, plan: SpanPlan, offset_ns: int) -> None:
        """Children first: once the root ends, the story is told."""
        context = set_span_in_context(root, Context())
        trace_id = root.get_span_context().trace_id
        for child in plan.children:
            self._ids.plan(trace_id, child.span_id)
            span = self._tracer.start_span(
                child.name,
                context=context,
                attributes=child.attributes,
                start_time=to_unix_ns(child.start_s, offset_ns),
            )
            span.end(to_unix_ns(child.end_s, offset_ns))
        root.set_attributes(plan.attributes)
        for event in plan.events:
            root.add_event(event.name, timestamp=to_unix_ns(event.at_s, offset_ns))
        if plan.is_error:
            root.set_status(StatusCode.ERROR)
        root.end(to_unix_ns(plan.end_s, offset_ns))


def _remote_parent(trace: TraceParent) -> Context:
    """The caller's span as the context of ours. Without one, a context of nothing at all."""
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
    """The caller's state, or none if any of it is malformed, as W3C Trace Context allows.

    Checked here, because the SDK would write a malformed member into the log.
    """
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    if len(members) > _MAX_STATE_MEMBERS or not all(map(_STATE_MEMBER.fullmatch, members)):
        return TraceState()
    pairs = dict(member.split("=", 1) for member in members)
    return TraceState(list(pairs.items())) if len(pairs) == len(members) else TraceState()
