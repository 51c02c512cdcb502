"""The OpenTelemetry SDK's spans of one request record, as a tree that tests can compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.attributes import start_attributes
from penstock.server.observe.spans.keys import SAMPLING_REASON
from penstock.server.observe.spans.span_writer import PlannedIds, SpanWriter, UnixClock


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A span; times are Unix nanoseconds. A root span has only the attributes set at its end."""

    name: str
    span_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    is_error: bool
    events: tuple[tuple[str, int], ...]
    children: tuple[SpanTree, ...] = ()


_IDS, _EXPORTER = PlannedIds(), InMemorySpanExporter()
_PROVIDER = TracerProvider(id_generator=_IDS, shutdown_on_exit=False)
_PROVIDER.add_span_processor(SimpleSpanProcessor(_EXPORTER))
"""Exports to memory; shared by all calls of `tree_of`."""


def tree_of(record: RequestRecord, *, offset_ns: int = 0, **options: Any) -> SpanTree:
    """Write the spans of a record and return their tree. `offset_ns`: Unix time minus monotonic
    time, nanoseconds. `options`: fields of TracingConfig.
    """
    reported: Any = {"model": "tiny-served", "version": "0"}
    clock = UnixClock(lambda: 0, lambda: offset_ns)
    writer = SpanWriter(_PROVIDER, _IDS, TracingConfig(**options), clock=clock, **reported)
    _EXPORTER.clear()
    assert writer.write(record)
    *children, root = _EXPORTER.get_finished_spans()
    assert {child.parent and child.parent.span_id for child in children} <= {_id_of(root)}
    tree = _tree(root)
    known = {*start_attributes(record), SAMPLING_REASON}
    end = {name: value for name, value in tree.attributes.items() if name not in known}
    return replace(tree, attributes=end, children=tuple(map(_tree, children)))


def _tree(span: ReadableSpan) -> SpanTree:
    return SpanTree(
        name=span.name,
        span_id=_id_of(span),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        attributes=dict(span.attributes or {}),
        is_error=not span.status.is_ok and not span.status.is_unset,
        events=tuple((event.name, event.timestamp) for event in span.events),
    )


def _id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)
