"""Checks the spans of every request: one root each, and children that cover it.

Owns the rules. Pure: does not know where spans come from, nor what was asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedSpan:
    """Of a span, what the rules look at. Times in Unix nanoseconds."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request. `parent_id`: the span under which its root must hang.

    `is_answered`: something came back, so that the server must have known it. Of others it may
    never have received.
    """

    trace_id: bytes
    parent_id: bytes
    is_answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found. `num_unheard`: neither answered nor traced: no fault.

    `num_missing`, `num_repeated`: requests without a root that must have one, and with several.
    `num_strange`: spans of no request's trace, or under a span that is not its root.
    `num_untiled`: roots whose children leave a gap, overlap or stick out by more than allowed;
    `worst_gap_ns`: the most that any does. `num_outside`: children that stick out of their root.
    """

    num_requests: int
    num_roots: int
    num_spans: int
    num_unheard: int
    num_missing: int
    num_repeated: int
    num_strange: int
    num_untiled: int
    num_outside: int
    worst_gap_ns: int
    names: Mapping[str, int]


def audit(sent: Collection[Sent], spans: Iterable[AuditedSpan], *, max_gap_ns: int) -> Audit:
    """Compare. Trace ids of `sent` differ from each other."""
    by_trace: dict[bytes, list[AuditedSpan]] = defaultdict(list)
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
        roots = [span for span in found if span.parent_id == request.parent_id]
        counts["roots"] += len(roots)
        if not roots:
            counts["missing" if request.is_answered or found else "unheard"] += 1
        counts["repeated"] += len(roots) > 1
        known = {root.span_id for root in roots}
        counts["strange"] += sum(
            span.parent_id not in known and span.parent_id != request.parent_id for span in found
        )
        for root in roots:
            children = [span for span in found if span.parent_id == root.span_id]
            gap_ns = untiled_ns(root, children)
            worst_ns = max(worst_ns, gap_ns)
            counts["untiled"] += gap_ns > max_gap_ns
            counts["outside"] += sum(
                child.start_ns < root.start_ns or child.end_ns > root.end_ns for child in children
            )
    counts["strange"] += sum(len(spans) for spans in by_trace.values())
    return Audit(
        num_requests=len(sent),
        num_roots=counts["roots"],
        num_spans=num_spans,
        num_unheard=counts["unheard"],
        num_missing=counts["missing"],
        num_repeated=counts["repeated"],
        num_strange=counts["strange"],
        num_untiled=counts["untiled"],
        num_outside=counts["outside"],
        worst_gap_ns=worst_ns,
        names=dict(names),
    )


def untiled_ns(root: AuditedSpan, children: Collection[AuditedSpan]) -> int:
    """The longest stretch by which children miss the root's ends, or each other.

    Of a root without children: all of it.
    """
    if not children:
        return root.end_ns - root.start_ns
    ordered = sorted(children, key=lambda child: (child.start_ns, child.end_ns))
    edges = [
        abs(ordered[0].start_ns - root.start_ns),
        abs(max(child.end_ns for child in ordered) - root.end_ns),
        *(abs(after.start_ns - before.end_ns) for before, after in pairwise(ordered)),
        *(max(0, child.start_ns - child.end_ns) for child in ordered),
    ]
    return max(edges)
