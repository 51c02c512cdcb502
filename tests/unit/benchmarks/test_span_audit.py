"""The rules of the trace audit: what counts as missing, repeated, strange, untiled."""

import dataclasses
import importlib
from itertools import pairwise
from typing import Any

import pytest

MS = 1_000_000
TRACE, PARENT, ROOT = b"t" * 16, b"p" * 8, b"r" * 8


@pytest.fixture
def rules() -> Any:
    return importlib.import_module("span_audit")


def sent(rules: Any, *, is_answered: bool = True) -> Any:
    return rules.Sent(trace_id=TRACE, parent_id=PARENT, is_answered=is_answered)


def tree(rules: Any, *edges_ms: float, span_id: bytes = ROOT) -> list[Any]:
    """A root from the first edge to the last, with a child between any two."""
    edges = [round(edge * MS) for edge in edges_ms]

    def span(number: int, parent: bytes, start: int, end: int) -> Any:
        own = span_id if number == 0 else bytes([number]) * 8
        return rules.AuditedSpan(
            trace_id=TRACE, span_id=own, parent_id=parent, name="x", start_ns=start, end_ns=end
        )

    children = [
        span(number, span_id, start, end)
        for number, (start, end) in enumerate(pairwise(edges), start=1)
    ]
    return [span(0, PARENT, edges[0], edges[-1]), *children]


def audit(rules: Any, requests: list[Any], spans: list[Any]) -> Any:
    return rules.audit(requests, spans, max_gap_ns=MS)


def test_a_whole_trace_breaks_no_rule(rules: Any) -> None:
    found = audit(rules, [sent(rules)], tree(rules, 0, 2, 3, 9))
    assert (found.num_requests, found.num_roots, found.num_spans) == (1, 1, 4)
    assert found.num_missing == found.num_repeated == found.num_strange == 0
    assert found.num_untiled == found.num_outside == found.worst_gap_ns == 0


def test_an_answered_request_must_have_a_root_and_another_need_not(rules: Any) -> None:
    found = audit(rules, [sent(rules)], [])
    assert (found.num_missing, found.num_unheard) == (1, 0)
    found = audit(rules, [sent(rules, is_answered=False)], [])
    assert (found.num_missing, found.num_unheard) == (0, 1)


def test_children_without_their_root_are_strange_and_their_root_is_missing(rules: Any) -> None:
    found = audit(rules, [sent(rules, is_answered=False)], tree(rules, 0, 2, 3)[1:])
    assert (found.num_missing, found.num_strange) == (1, 2)


def test_a_second_root_is_told(rules: Any) -> None:
    spans = tree(rules, 0, 2) + tree(rules, 0, 2, span_id=b"s" * 8)
    found = audit(rules, [sent(rules)], spans)
    assert (found.num_roots, found.num_repeated) == (2, 1)


def test_spans_of_other_traces_are_strange(rules: Any) -> None:
    spans = [dataclasses.replace(span, trace_id=b"u" * 16) for span in tree(rules, 0, 2)]
    assert audit(rules, [], spans).num_strange == 2


@pytest.mark.parametrize(
    ("place", "changes", "gap_ms", "num_outside"),
    [
        (1, {"end_ns": 1 * MS}, 1, 0),  # a gap of what is allowed
        (1, {"end_ns": 4 * MS}, 2, 0),  # an overlap
        (1, {"start_ns": 2 * MS}, 2, 0),  # a late start
        (2, {"end_ns": 12 * MS}, 3, 1),  # beyond the root
        (1, {"start_ns": -5 * MS}, 5, 1),  # before it
    ],
)
def test_gaps_and_overlaps_are_measured(
    rules: Any, place: int, changes: dict[str, int], gap_ms: int, num_outside: int
) -> None:
    spans = tree(rules, 0, 2, 9)
    spans[place] = dataclasses.replace(spans[place], **changes)
    found = audit(rules, [sent(rules)], spans)
    assert found.worst_gap_ns == gap_ms * MS
    assert found.num_untiled == (gap_ms > 1)
    assert found.num_outside == num_outside


def test_a_root_without_children_is_all_gap(rules: Any) -> None:
    assert audit(rules, [sent(rules)], tree(rules, 0, 7)[:1]).worst_gap_ns == 7 * MS


def test_a_child_between_two_others_does_not_hide_the_end_of_a_long_one(rules: Any) -> None:
    spans = tree(rules, 0, 2, 9)
    spans[1] = dataclasses.replace(spans[1], end_ns=9 * MS)
    assert audit(rules, [sent(rules)], spans).worst_gap_ns == 7 * MS


def test_asks_have_traces_of_their_own_and_come_the_same_again() -> None:
    load: Any = importlib.import_module("trace_audit_load")
    asks = load.make_asks(3000, 1, 150.0)
    assert len({ask.trace_id for ask in asks}) == 3000
    assert {ask.kind for ask in asks} == set(load.Kind)
    assert {ask.is_multiplexed for ask in asks} == {True, False}
    assert load.make_asks(3000, 1, 150.0) == asks
    assert load.make_asks(3000, 2, 150.0) != asks
