"""How many replicas are requested, given the queue times and the share of busy time of each
replica.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.ray.scaling import QueueTimePolicy

POLICY = QueueTimePolicy(target_queue_time_s=0.5, target_busy_share=0.7, max_growth=2.0)


def wanted(waits_s: list[float], busy: list[float], planned: int | None = None) -> int:
    return POLICY.num_wanted(
        num_replicas=len(busy),
        num_planned=len(busy) if planned is None else planned,
        queue_time_s=dict(enumerate(waits_s)),
        busy_share=dict(enumerate(busy)),
    )


@pytest.mark.parametrize(
    ("waits_s", "busy", "num"),
    [
        ([0.6], [1.0], 2),
        ([60.0], [1.0], 2),
        ([0.75, 0.75], [1.0, 1.0], 3),
        ([9.0, 9.0, 9.0], [1.0, 1.0, 1.0], 6),
        ([0.5], [1.0], 1),
        ([0.0, 0.0], [0.7, 0.7], 2),
        ([0.0, 0.0], [0.35, 0.35], 1),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 1),
        ([0.0, 0.0, 0.0, 0.0], [0.9, 0.1, 0.2, 0.3], 3),
    ],
)
def test_waits_add_replicas_and_empty_batches_remove_them(
    waits_s: list[float], busy: list[float], num: int
) -> None:
    assert wanted(waits_s, busy) == num


def test_no_replica_is_added_while_others_are_starting() -> None:
    assert wanted([9.0, 9.0], [1.0, 1.0], planned=3) == 3


def test_replicas_that_are_still_starting_can_be_removed() -> None:
    assert wanted([0.0, 0.0], [0.1, 0.1], planned=4) == 1


def test_nothing_changes_while_a_replica_has_not_reported() -> None:
    assert wanted([9.0], [1.0, 1.0]) == 2
    assert wanted([], [0.0, 0.0, 0.0]) == 3


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), min_size=1, max_size=50),
    st.integers(0, 10),
)
def test_one_decision_is_bounded(reported: list[tuple[float, float]], num_missing: int) -> None:
    num = len(reported)
    planned = num + num_missing

    got = wanted([wait_s for wait_s, _ in reported], [share for _, share in reported], planned)

    assert 1 <= got <= max(planned, 2 * num)


def test_serves_context_is_read() -> None:
    context = SimpleNamespace(
        current_num_replicas=2,
        target_num_replicas=2,
        aggregated_metrics={"queue_time_s": {"a": 2.0, "b": 1.0}, "busy_share": {"a": 1.0, "b": 1}},
    )
    assert POLICY(context) == (4, {})
    context.aggregated_metrics = None
    assert POLICY(context) == (2, {})


@pytest.mark.parametrize(
    "off", [{"target_queue_time_s": 0.0}, {"target_busy_share": 1.5}, {"max_growth": 1.0}]
)
def test_invalid_parameters_are_named(off: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(off))):
        QueueTimePolicy(**off)
