"""Removed requests, outputs that wait for their leader, and the times at which waiting requests are
due to be checked again.
"""

import pytest

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.queue_order import ArrivalOrder
from penstock.scheduler.request import NO_TIME, Request, RequestSpec
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_queue import WaitingQueue
from penstock.scheduler.waiting_sums import WaitingSums
from support.core import make_spec


def waiting(spec: RequestSpec, sequence: int) -> Request:
    return Request(spec=spec, sequence=sequence, tokens=spec.prompt_ids, block_hashes=[])


def make_queue() -> WaitingQueue:
    config = SchedulerConfig(order=SchedulingOrder.FCFS)
    tenants = TenantCounters(config)
    return WaitingQueue(
        config,
        tenants=tenants,
        displacement=Displacement(config, tenants),
        sums=WaitingSums(config),
        waits=WaitClock(),
    )


def drain(queue: WaitingQueue) -> list[int]:
    keys: list[int] = []
    while (request := queue.order.peek(0.0)) is not None:
        queue.leave(request, 0.0)
        keys.append(request.spec.key)
    return keys


def test_removed_requests_are_gone_and_tokens_counted() -> None:
    queue = make_queue()
    requests = [waiting(make_spec(key, key), key) for key in range(1, 301)]
    for request in requests:
        queue.push(request, 0.0)
    assert queue.num_tokens == sum(range(1, 301))
    for request in requests[1:]:
        queue.leave(request, 0.0)
    assert len(queue) == 1
    assert queue.num_tokens == 1
    assert isinstance(queue.order, ArrivalOrder)
    assert len(queue.order._heap) <= 66, "stale entries pile up"
    assert drain(queue) == [1]


def test_a_follower_that_ends_while_it_waits_for_its_leader_is_not_queued_again() -> None:
    queue = make_queue()
    queue.push(waiting(make_spec(1), 0), 0.0)
    followers = [waiting(make_spec(key, leader_key=1), key) for key in (2, 3)]
    for follower in followers:
        queue.hold(follower, 1, now=0.0)
    queue.leave(followers[0], 0.0)
    assert drain(queue) == [1]
    queue.release_held(1)
    assert drain(queue) == [3]


def test_a_request_is_due_at_its_time_and_returned_once() -> None:
    queue = make_queue()
    soon, later, never = (waiting(make_spec(key), key) for key in (1, 2, 3))
    soon.recheck_s, later.recheck_s = 5.0, 7.0
    for request in (soon, later, never):
        queue.push(request, 0.0)
    assert queue.next_recheck_s() == 5.0
    assert queue.due(4.9) == []
    assert queue.due(7.0) == [soon, later]
    assert queue.due(7.0) == []
    assert queue.next_recheck_s() == NO_TIME


def test_a_postponed_request_is_due_only_at_its_new_time() -> None:
    queue = make_queue()
    request = waiting(make_spec(1), 0)
    request.recheck_s = 5.0
    queue.push(request, 0.0)
    queue.recheck(request, 8.0)
    assert queue.next_recheck_s() == 8.0
    assert queue.due(7.0) == []
    assert queue.due(8.0) == [request]


@pytest.mark.parametrize("is_asked", [False, True])
def test_requests_due_at_one_time_come_in_order_of_arrival(is_asked: bool) -> None:
    """The order does not depend on an earlier call of `next_recheck_s`, which removes outdated
    entries.
    """
    queue = make_queue()
    first, second, third = (waiting(make_spec(key), key) for key in (1, 2, 3))
    first.recheck_s = third.recheck_s = second.recheck_s = 5.0
    for request in (first, third, second):
        queue.push(request, 0.0)
    queue.recheck(first, 8.0)
    if is_asked:
        assert queue.next_recheck_s() == 5.0
    queue.recheck(first, 5.0)
    assert queue.due(5.0) == [first, second, third]


def test_a_removed_request_is_not_due() -> None:
    queue = make_queue()
    request = waiting(make_spec(1), 0)
    request.recheck_s = 5.0
    queue.push(request, 0.0)
    queue.leave(request, 0.0)
    assert queue.next_recheck_s() == NO_TIME
    assert queue.due(6.0) == []
