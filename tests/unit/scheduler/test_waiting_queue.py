"""Order, expiry, and siblings that wait for their leader."""

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.queue_order import ArrivalOrder
from penstock.scheduler.request import NO_TIME, Request, RequestSpec
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.waiting_queue import WaitingQueue
from penstock.scheduler.waiting_sums import WaitingSums
from support.core import make_spec


def waiting(spec: RequestSpec, sequence: int) -> Request:
    return Request(spec=spec, sequence=sequence, tokens=spec.prompt_ids, block_hashes=[])


def make_queue() -> tuple[WaitingQueue, ArrivalOrder]:
    config = SchedulerConfig()
    tenants = Tenants(config)
    sums, places = WaitingSums(config, block_size=16), Displacement(config, tenants)
    order = ArrivalOrder()
    return WaitingQueue(order, tenants, sums, places), order


def drain(queue: WaitingQueue, order: ArrivalOrder) -> list[int]:
    keys: list[int] = []
    while (request := order.peek(0.0)) is not None:
        queue.remove(request)
        keys.append(request.spec.key)
    return keys


def test_classes_are_strict_and_first_come_first_served_inside() -> None:
    queue, order = make_queue()
    for sequence, (key, priority) in enumerate([(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]):
        queue.push(waiting(make_spec(key, priority=priority), sequence))
    assert drain(queue, order) == [2, 4, 1, 3, 5]


def test_seniority_survives_coming_back() -> None:
    queue, order = make_queue()
    first, second = waiting(make_spec(1), 0), waiting(make_spec(2), 1)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.push(first)
    assert drain(queue, order) == [1, 2]


def test_removed_requests_are_gone_and_tokens_counted() -> None:
    queue, order = make_queue()
    requests = [waiting(make_spec(key, key), key) for key in range(1, 301)]
    for request in requests:
        queue.push(request)
    assert queue.num_tokens == sum(range(1, 301))
    for request in requests[1:]:
        queue.remove(request)
    assert len(queue) == 1
    assert queue.num_tokens == 1
    assert len(order) == 1
    assert len(order._heap) <= 66, "stale entries pile up"
    assert drain(queue, order) == [1]


def test_followers_wait_for_their_leader() -> None:
    queue, order = make_queue()
    queue.push(waiting(make_spec(1), 0))
    for key in (2, 3):
        queue.hold(waiting(make_spec(key, leader_key=1), key), 1)
    queue.push(waiting(make_spec(4), 4))
    assert len(queue) == 4
    assert drain(queue, order) == [1, 4]
    queue.release_held(1)
    assert drain(queue, order) == [2, 3]


def test_an_heir_leads_when_the_leader_ends() -> None:
    queue, order = make_queue()
    followers = [waiting(make_spec(key, leader_key=1), key) for key in (2, 3, 4)]
    for follower in followers:
        queue.hold(follower, 1)
    queue.remove(followers[0])
    queue.replace_leader(1)
    assert drain(queue, order) == [3]
    queue.release_held(3)
    assert drain(queue, order) == [4]


def test_a_request_is_due_at_its_time_and_told_once() -> None:
    queue, _ = make_queue()
    soon, later, never = (waiting(make_spec(key), key) for key in (1, 2, 3))
    soon.recheck_s, later.recheck_s = 5.0, 7.0
    for request in (soon, later, never):
        queue.push(request)
    assert queue.next_recheck_s() == 5.0
    assert queue.due(4.9) == []
    assert queue.due(7.0) == [soon, later]
    assert queue.due(7.0) == []
    assert queue.next_recheck_s() == NO_TIME


def test_a_request_that_is_put_off_is_due_at_its_new_time_alone() -> None:
    queue, _ = make_queue()
    request = waiting(make_spec(1), 0)
    request.recheck_s = 5.0
    queue.push(request)
    queue.recheck(request, 8.0)
    assert queue.next_recheck_s() == 8.0
    assert queue.due(7.0) == []
    assert queue.due(8.0) == [request]


def test_who_left_is_not_due() -> None:
    queue, _ = make_queue()
    request = waiting(make_spec(1), 0)
    request.recheck_s = 5.0
    queue.push(request)
    queue.remove(request)
    assert queue.next_recheck_s() == NO_TIME
    assert queue.due(6.0) == []
