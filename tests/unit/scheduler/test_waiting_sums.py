"""The work that is ahead of a new request, summed without a pass over the queue."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.waiting_sums import WaitingSums
from support.core import make_spec

WEIGHTS = {"heavy": 3.0}


def waiting(key: int, num_tokens: int, *, tenant: str = "", priority: int = 0) -> Request:
    spec = make_spec(key, tenant=tenant, priority=priority)
    request = Request(spec=spec, sequence=key, tokens=spec.prompt_ids, block_hashes=[])
    request.num_uncached_tokens, request.num_blocks = num_tokens, -(-num_tokens // 8)
    return request


def make_sums(order: SchedulingOrder = SchedulingOrder.FAIR) -> WaitingSums:
    config = SchedulerConfig(order=order, tenant_weights=WEIGHTS, aging_s=30.0)
    return WaitingSums(config)


def test_in_arrival_order_all_of_the_class_and_above_go_first() -> None:
    sums = make_sums(SchedulingOrder.FCFS)
    sums.add(waiting(1, 10, priority=1), NO_TIME)
    sums.add(waiting(2, 20, tenant="a"), 1.0)
    sums.add(waiting(3, 40, tenant="b", priority=-1), NO_TIME)

    ahead = sums.ahead_of(waiting(9, 5, tenant="c"), NO_TIME, 5)

    assert (ahead.num_requests, ahead.num_prefill_tokens) == (2, 30)
    assert ahead.num_blocks == 5


def test_within_a_tenant_the_earliest_deadline_is_first() -> None:
    sums = make_sums()
    sums.add(waiting(1, 10, tenant="a"), 2.0)
    sums.add(waiting(2, 20, tenant="a"), 9.0)

    assert sums.ahead_of(waiting(9, 5, tenant="a"), 4.0, 5).num_prefill_tokens == 10
    assert sums.ahead_of(waiting(9, 5, tenant="a"), 10.0, 5).num_prefill_tokens == 30


def test_no_deadline_counts_as_due_when_age_would_count() -> None:
    sums = make_sums()
    sums.add(waiting(1, 10), NO_TIME)

    assert sums.ahead_of(waiting(9, 5), 29.0, 5).num_prefill_tokens == 0
    assert sums.ahead_of(waiting(9, 5), NO_TIME, 5).num_prefill_tokens == 10


def test_other_tenants_get_their_share_of_the_time_that_ones_own_takes() -> None:
    sums = make_sums()
    sums.add(waiting(1, 30, tenant="a"), NO_TIME)
    for key in range(2, 12):
        sums.add(waiting(key, 100, tenant="b"), NO_TIME)

    ahead = sums.ahead_of(waiting(90, 20, tenant="a"), NO_TIME, 20)

    # 30 and its own 20, as much of the other's, which makes one request.
    assert ahead.num_prefill_tokens == 80
    assert ahead.num_requests == 2


def test_a_greater_weight_waits_for_less_of_the_others() -> None:
    sums = make_sums()
    sums.add(waiting(1, 600, tenant="b"), NO_TIME)

    light = sums.ahead_of(waiting(90, 60, tenant="a"), NO_TIME, 60)
    heavy = sums.ahead_of(waiting(91, 60, tenant="heavy"), NO_TIME, 60)

    assert (light.num_prefill_tokens, heavy.num_prefill_tokens) == (60, 20)


def test_others_are_served_no_more_than_they_have_waiting() -> None:
    sums = make_sums()
    sums.add(waiting(1, 7, tenant="b"), NO_TIME)

    assert sums.ahead_of(waiting(9, 500), NO_TIME, 500).num_prefill_tokens == 7


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "heavy"]),
            st.integers(-1, 1),
            st.integers(1, 500),
            st.sampled_from([0.5, 3.0, 40.0, NO_TIME]),
            st.booleans(),
        ),
        max_size=30,
    ),
    st.sampled_from(list(SchedulingOrder)),
)
def test_sums_follow_arrivals_and_departures(
    plays: list[tuple[str, int, int, float, bool]], order: SchedulingOrder
) -> None:
    sums = make_sums(order)
    there: dict[int, Request] = {}
    for key, (tenant, priority, num_tokens, due_s, leaves) in enumerate(plays, start=1):
        request = there[key] = waiting(key, num_tokens, tenant=tenant, priority=priority)
        sums.add(request, due_s)
        if leaves:
            gone = there.pop(int(np.median(list(there))) if len(there) % 2 else key)
            sums.remove(gone)
            sums.remove(gone)
        assert sums.faults() == []
        assert len(sums) == len(there)
    above = sum(r.num_uncached_tokens for r in there.values() if r.spec.priority > 0)
    ahead = sums.ahead_of(waiting(999, 1, tenant="a"), -1.0, 1)
    if order is SchedulingOrder.FAIR:
        assert ahead.num_prefill_tokens >= above
    for request in there.values():
        sums.remove(request)
    assert len(sums) == 0
    assert sums.ahead_of(waiting(999, 1), NO_TIME, 1).num_requests == 0
