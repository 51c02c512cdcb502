"""The reported reasons for which a request waited, for every way in which it leaves the queue."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.events import (
    Admitted,
    Completed,
    Failed,
    Preempted,
    Queued,
    StepEvents,
    Wait,
    WaitReason,
)
from penstock.scheduler.request import FailureReason, RequestSpec
from support.core import (
    BLOCK_SIZE,
    FakeClock,
    ends,
    make_engine,
    make_spec,
)
from support.self_paced import make_self_paced

STEP_S = 1.0


class Site:
    """An engine whose steps take one second each."""

    def __init__(self, *, budget: int = 64, **settings: Any) -> None:
        self.clock = FakeClock()
        self.clock.now_s = 100.0
        self.engine, self.executor = make_engine(
            clock=self.clock,
            max_num_batched_tokens=budget,
            **{"deadline_admission": False, **settings},
        )
        self.reported: list[StepEvents] = []

    def submit(self, key: int, prompt: int = 3, **options: Any) -> None:
        self.engine.submit((make_spec(key, prompt, arrival_s=self.clock(), **options),))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.reported.append(self.engine.step())
            self.engine.check_integrity()
            self.clock.now_s += STEP_S

    def run(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still busy")

    def waits(self, key: int) -> list[Wait]:
        """Return a request's waits, one for each admission."""
        found = [
            change.wait
            for events in self.reported
            for change in events.changes
            if isinstance(change, Admitted) and change.key == key
        ]
        return [wait for wait in found if wait is not None]

    def wait(self, key: int) -> Wait:
        (wait,) = self.waits(key)
        return rounded(wait)


def rounded(wait: Wait) -> Wait:
    """Return the wait with times rounded to microseconds, as they are sums of floats."""
    names = ("blocks_s", "slots_s", "token_budget_s", "fairness_s", "other_s")
    return wait._replace(**{name: round(getattr(wait, name), 6) for name in names})


def test_a_queued_request_has_the_reason_why_the_queue_waits() -> None:
    site = Site(max_num_seqs=1)
    site.submit(1, max_tokens=9)
    site.submit(2)
    site.step()
    site.submit(3)
    site.step()

    changes = [change for events in site.reported for change in events.changes]
    assert [(change.key, change.waits_for) for change in changes if isinstance(change, Queued)] == [
        (1, None),
        (2, None),
        (3, WaitReason.SLOTS),
    ]


def test_a_request_admitted_at_once_waits_only_for_the_next_step() -> None:
    site = Site()
    site.submit(1)
    site.clock.now_s += 0.25
    site.step()
    assert site.wait(1) == Wait(other_s=0.25)


def test_slots() -> None:
    site = Site(max_num_seqs=1)
    site.submit(1, max_tokens=4)
    site.submit(2)
    site.run()
    assert site.wait(1) == Wait()
    assert site.wait(2) == Wait(slots_s=4.0)


def test_blocks() -> None:
    site = Site(num_blocks=4, max_seq_len=16, watermark=0.0)
    site.submit(1, 10, max_tokens=3)
    site.submit(2, 10, max_tokens=1)
    site.run()
    assert site.wait(2) == Wait(blocks_s=3.0)


def test_token_budget() -> None:
    site = Site(budget=8, order=SchedulingOrder.FCFS)
    site.submit(1, 24, max_tokens=1)
    site.submit(2, 2)
    site.run()
    # Three steps are full; the third has nothing left either.
    assert site.wait(2) == Wait(token_budget_s=3.0)


def test_a_prompt_too_long_for_what_is_left_waits_for_tokens() -> None:
    clock = FakeClock()
    engine, executor = make_self_paced(budget=8, clock=clock)
    engine.submit((make_spec(1, 10), make_spec(2, 16, request_id="request-1")))
    engine.submit((make_spec(3, 16),))
    first = engine.step()
    assert [change.key for change in first.changes if isinstance(change, Admitted)] == [1]
    clock.now_s = 2.0
    executor.emit(1)
    changes = engine.step().changes
    waits = {change.key: change.wait for change in changes if isinstance(change, Admitted)}
    assert rounded(waits[2] or Wait()) == Wait(token_budget_s=2.0)
    engine.close()


def test_a_tenant_at_its_limit_waits_for_fairness() -> None:
    site = Site(max_num_running_per_tenant=1)
    site.submit(1, max_tokens=3, tenant="a")
    site.submit(2, tenant="a")
    site.run()
    assert site.wait(2) == Wait(fairness_s=3.0)


def test_fairness_begins_when_another_tenants_later_arrival_is_admitted() -> None:
    site = Site(max_num_seqs=1, tenant_burst_tokens=0, yield_ratio=math.inf)
    site.submit(1, 8, max_tokens=2, tenant="flood")
    site.submit(2, 8, max_tokens=2, tenant="flood")
    site.step()
    site.submit(3, 8, max_tokens=3, tenant="guest")
    site.run()
    assert site.wait(3) == Wait(slots_s=1.0)
    # Two seconds for the separate first tenant, three for the guest, which came later.
    assert site.wait(2) == Wait(slots_s=2.0, fairness_s=3.0, num_passed_by=1)


def test_waiting_for_a_higher_class_does_not_count_as_fairness() -> None:
    site = Site(max_num_seqs=1, yield_ratio=math.inf)
    site.submit(1, max_tokens=2, tenant="a")
    site.submit(2, tenant="b")
    site.submit(3, max_tokens=2, tenant="c", priority=1)
    site.run()
    assert site.wait(2) == Wait(slots_s=4.0, num_passed_by=1)


@pytest.mark.parametrize("order", SchedulingOrder)
def test_later_requests_that_were_admitted_first_are_counted(order: SchedulingOrder) -> None:
    site = Site(max_num_seqs=1, order=order)
    site.submit(1)
    site.submit(2)
    for key in (3, 4, 5):
        site.submit(key, priority=key)
    site.run()
    assert [site.wait(key).num_passed_by for key in range(1, 6)] == [3, 3, 2, 1, 0]


def test_each_residency_has_its_own_account() -> None:
    site = Site(
        num_blocks=6,
        max_seq_len=24,
        max_num_seqs=2,
        watermark=0.0,
        admission_policy=AdmissionPolicy.MAX_UTILIZATION,
    )
    site.submit(1, 8, max_tokens=14)
    site.submit(2, 8, max_tokens=14)
    site.run()
    preempted = [
        change
        for events in site.reported
        for change in events.changes
        if isinstance(change, Preempted)
    ]
    assert [change.key for change in preempted] == [2]
    first, second = site.waits(2)
    (end,) = [end for key, end in ends(site.reported).items() if key == 1]
    assert rounded(first) == Wait()
    assert rounded(second) == Wait(blocks_s=round(end.at_s + STEP_S - preempted[0].at_s, 6))


def test_outputs_that_wait_for_their_prompt_wait_for_no_resource() -> None:
    site = Site(budget=8)
    first = make_spec(1, 24, max_tokens=2, arrival_s=site.clock())
    site.engine.submit((first, replace(first, key=2, leader_key=1, output_index=1)))
    site.run()
    assert site.wait(2) == Wait(other_s=3.0)


def cancel(site: Site) -> None:
    site.engine.cancel(2)


def pass_deadline(site: Site) -> None:
    site.clock.now_s += 5.0


@pytest.mark.parametrize(
    ("options", "end", "waited_s"),
    [
        ({}, cancel, 1.0),
        ({"deadline_s": 104.0}, pass_deadline, 6.0),
        ({"time_limit_s": 104.0}, pass_deadline, 6.0),
    ],
)
def test_a_request_that_leaves_the_queue_reports_why_it_waited(
    options: dict[str, Any], end: Callable[[Site], None], waited_s: float
) -> None:
    site = Site(max_num_seqs=1)
    site.submit(1, max_tokens=40)
    site.step()
    site.submit(2, **options)
    site.step()
    end(site)
    site.step()
    reported = ends(site.reported)[2]
    assert reported.residency is None
    assert rounded(reported.wait or Wait()) == Wait(slots_s=waited_s)


def test_a_request_that_ends_in_the_batch_reports_only_its_residency() -> None:
    site = Site()
    site.submit(1, max_tokens=2)
    site.run()
    (end,) = ends(site.reported).values()
    assert isinstance(end, Completed)
    assert end.wait is None
    assert end.residency is not None


def test_rejected_requests_have_no_wait() -> None:
    site = Site(max_num_waiting=1, max_num_seqs=1)
    site.submit(1, 3, max_tokens=60 * BLOCK_SIZE)
    site.submit(2)
    site.submit(3)
    site.submit(4, deadline_s=site.clock() - 1.0)
    site.step()
    reported = ends(site.reported)
    reasons = {key: end.reason for key, end in reported.items() if isinstance(end, Failed)}
    assert reasons == {
        1: FailureReason.PROMPT_TOO_LONG,
        3: FailureReason.QUEUE_FULL,
        4: FailureReason.DEADLINE_EXCEEDED,
    }
    assert all(
        end.wait is None and end.residency is None for end in reported.values() if end.key != 2
    )


def test_counts_of_a_waiting_request_survive_many_arrivals() -> None:
    """The count entries of admitted requests are reused. A request that waits all the time keeps
    its count of the requests that overtook it.
    """
    site = Site(max_num_seqs=1, aging_s=math.inf)
    num_others = 600
    old = make_spec(10**6, 3, hashed=False, arrival_s=site.clock(), priority=-1)
    site.engine.submit((old,))
    for key in range(2, num_others + 2):
        site.engine.submit((quick(key, site.clock()),))
        site.reported.append(site.engine.step())
        site.clock.now_s += STEP_S
    site.run()
    assert site.wait(10**6).num_passed_by == num_others


def quick(key: int, arrival_s: float) -> RequestSpec:
    return make_spec(key, [1, 2], max_tokens=1, hashed=False, arrival_s=arrival_s)
