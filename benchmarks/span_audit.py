"""Checks that every request has exactly one root span, and child spans that cover it.

Contains only pure functions of the spans and the list of sent requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """A request that was sent. `parent_id`: id of the client's span, the parent of the root span.

    `is_answered`: the client received a response, so the server must have received the request. A
    request without a response may not have reached it.
    """

    trace_id: bytes
    parent_id: bytes
    is_answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of the audit.

    Attributes:
        num_unreached: Requests without response and without trace; this is not an error.
        num_missing: Requests that lack a required root span.
        num_repeated: Requests with several root spans.
        num_unexpected: Spans outside every request's trace, or whose parent is neither the root
            span nor the client's span.
        num_outside: Child spans that begin before or end after their root span.
        num_uncovered: Root spans whose children leave a gap, overlap or exceed the root span by
            more than allowed.
        worst_gap_ns: The longest gap, overlap or excess of any root span, nanoseconds.
    """

    num_requests: int
    num_roots: int
    num_spans: int
    num_unreached: int
    num_missing: int
    num_repeated: int
    num_unexpected: int
    num_uncovered: int
    num_outside: int
    worst_gap_ns: int
    names: Mapping[str, int]


def audit(sent: Collection[SentRequest], spans: Iterable[Span], *, max_gap_ns: int) -> Audit:
    """Check the spans of all requests; return the counts. Trace ids of `sent` must be unique."""
    by_trace: dict[bytes, list[Span]] = defaultdict(list)
    names: Counter[str] = Counter()
    num_spans = 0
    for span in spans:
        by_trace[span.trace_id].append(span)
        names[span.name] += 1
        num_spans += 1
    counts: Counter[str] = Counter()
    worst_ns = 0
    for request in sent:
        found = by_trace.pop(request.trace_id, [])
        roots = [span for span in found if span.parent_span_id == request.parent_id]
        counts["roots"] += len(roots)
        if not roots:
            counts["missing" if request.is_answered or found else "unreached"] += 1
        counts["repeated"] += len(roots) > 1
        known = {root.span_id for root in roots}
        counts["unexpected"] += sum(
            span.parent_span_id not in known and span.parent_span_id != request.parent_id
            for span in found
        )
        for root in roots:
            children = [span for span in found if span.parent_span_id == root.span_id]
            gap_ns = uncovered_ns(root, children)
            worst_ns = max(worst_ns, gap_ns)
            counts["uncovered"] += gap_ns > max_gap_ns
            counts["outside"] += sum(
                child.start_time_unix_nano < root.start_time_unix_nano
                or child.end_time_unix_nano > root.end_time_unix_nano
                for child in children
            )
    counts["unexpected"] += sum(len(spans) for spans in by_trace.values())
    return Audit(
        num_requests=len(sent),
        num_roots=counts["roots"],
        num_spans=num_spans,
        num_unreached=counts["unreached"],
        num_missing=counts["missing"],
        num_repeated=counts["repeated"],
        num_unexpected=counts["unexpected"],
        num_uncovered=counts["uncovered"],
        num_outside=counts["outside"],
        worst_gap_ns=worst_ns,
        names=dict(names),
    )


def uncovered_ns(root: Span, children: Collection[Span]) -> int:
    """Return the longest gap or overlap between children, or between them and the root's ends.

    Without children: the root's duration.
    """
    start_ns, end_ns = root.start_time_unix_nano, root.end_time_unix_nano
    spans = sorted((one.start_time_unix_nano, one.end_time_unix_nano) for one in children)
    if not spans:
        return end_ns - start_ns
    edges = [
        abs(spans[0][0] - start_ns),
        abs(max(end for _, end in spans) - end_ns),
        *(abs(after[0] - before[1]) for before, after in pairwise(spans)),
        *(max(0, start - end) for start, end in spans),
    ]
    return max(edges)
