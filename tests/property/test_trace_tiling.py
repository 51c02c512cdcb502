"""In the trace of any request, the child spans cover the root span without gaps, and all ids
differ.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.request_record import RequestRecord, Segment, SegmentKind
from penstock.server.observe.spans.span_writer import MAX_CHILDREN
from support.reports import request_record, trace_parent
from support.span_trees import tree_of

OFFSET_NS = 1_763_000_000_123_456_789


@st.composite
def lives(draw: st.DrawFn) -> RequestRecord:
    """Draw a record whose segments, of any kinds and lengths, cover the request's lifetime."""
    arrival_s = draw(st.floats(0.001, 1e7))
    kinds = draw(st.lists(st.sampled_from(SegmentKind), min_size=1, max_size=12))
    times = [arrival_s]
    for _ in kinds:
        times.append(times[-1] + draw(st.floats(0.0, 1e4)))
    segments = tuple(
        Segment(kind, start_s, end_s)
        for kind, (start_s, end_s) in zip(kinds, itertools.pairwise(times), strict=True)
    )
    span_id = draw(st.integers(1, 2**64 - 1)).to_bytes(8, "big")
    return request_record(
        arrival_s=arrival_s,
        end_s=times[-1],
        segments=segments,
        trace=trace_parent(span_id=span_id),
        code=draw(st.integers(0, 16)),
        num_preemptions=draw(st.integers(0, 3)),
        num_replays=draw(st.integers(0, 2)),
    )


@given(lives())
def test_children_cover_the_root_to_the_nanosecond(record: RequestRecord) -> None:
    tree = tree_of(record, offset_ns=OFFSET_NS)
    assert len(tree.children) == len(record.segments) <= MAX_CHILDREN
    edges = [(span.start_ns, span.end_ns) for span in tree.children]
    assert edges[0][0] == tree.start_ns
    assert edges[-1][1] == tree.end_ns
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert all(start_ns <= end_ns for start_ns, end_ns in edges)
    assert all(tree.start_ns <= at_ns <= tree.end_ns for _, at_ns in tree.events)


@given(lives())
def test_ids_are_different_and_the_trace_is_a_function_of_the_record(record: RequestRecord) -> None:
    tree = tree_of(record)
    ids = [tree.span_id, *(span.span_id for span in tree.children)]
    assert len(set(ids)) == len(ids)
    assert all(0 < number < 2**64 for number in ids)
    assert tree == tree_of(record)
