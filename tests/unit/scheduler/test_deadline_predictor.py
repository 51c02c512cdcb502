"""Deadlines in scheduling: which requests are rejected or dropped, and with which status."""

import math
from dataclasses import replace

import pytest

from penstock.scheduler.config import SchedulingOrder
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason
from support.core import make_spec
from unit.scheduler.fixed_cost_engine import FixedCostEngine


def test_a_first_token_that_cannot_be_there_in_time_is_rejected_at_once() -> None:
    site = FixedCostEngine()
    begun_s = site.clock()
    site.submit(1, 100, ttft_deadline_s=0.1)
    site.step()
    failure = site.failure(1)
    assert failure.reason is FailureReason.TTFT_DEADLINE_UNREACHABLE
    assert failure.at_s == begun_s
    assert failure.estimate_s == pytest.approx(0.11)
    assert failure.deadline_s == pytest.approx(0.1)
    assert failure.retry_after_s == math.inf, "as much time again would not do either"
    assert 1 not in site.queued


def test_a_first_token_that_can_just_be_there_is_not_rejected() -> None:
    site = FixedCostEngine()
    site.submit(1, 100, ttft_deadline_s=0.12)
    site.run()
    assert isinstance(site.ends[1], Completed)


def test_a_total_deadline_counts_the_tokens_that_must_come() -> None:
    site = FixedCostEngine()
    site.submit(1, 100, min_tokens=11, max_tokens=20, deadline_s=0.2)
    site.submit(2, 100, min_tokens=1, max_tokens=20, deadline_s=0.9)
    site.run()
    failure = site.failure(1)
    assert failure.reason is FailureReason.DEADLINE_UNREACHABLE
    # 110 ms of prefill, ten steps of output, and what longer outputs take on average.
    assert failure.estimate_s is not None
    assert failure.estimate_s >= 0.21 - 1e-9
    assert isinstance(site.ends[2], Completed)


@pytest.mark.parametrize("order", list(SchedulingOrder))
def test_waiting_requests_ahead_delay_the_prediction(order: SchedulingOrder) -> None:
    site = FixedCostEngine(num_seqs=1, order=order)
    for key in range(1, 5):
        site.submit(key, 100, max_tokens=1, ttft_deadline_s=5.0)
    # Four prompts of 110 ms, the first of them not begun.
    site.submit(9, 100, ttft_deadline_s=0.35)
    site.submit(10, 100, ttft_deadline_s=5.0)
    site.run()
    # In the fair order it would precede requests with later deadlines.
    is_rejected = isinstance(site.ends[9], Failed)
    assert is_rejected is (order is SchedulingOrder.FCFS)
    assert isinstance(site.ends[10], Completed)


def test_a_rejected_request_has_the_time_when_the_queue_is_short_enough() -> None:
    site = FixedCostEngine(num_seqs=1, order=SchedulingOrder.FCFS)
    for key in range(1, 21):
        site.submit(key, 100, max_tokens=1)
    site.submit(30, 100, max_tokens=1, ttft_deadline_s=1.0)
    site.step()
    failure = site.failure(30)
    assert failure.estimate_s is not None
    assert failure.retry_after_s == pytest.approx(failure.estimate_s - 1.0)
    assert failure.estimate_s == pytest.approx(21 * 0.11, rel=0.2)


def test_a_queued_request_is_dropped_when_it_is_predicted_late() -> None:
    site = FixedCostEngine(num_seqs=1)
    for _ in range(1000):
        site.engine.completion.lengths.observe(5)
    site.submit(1, 4, max_tokens=300)
    site.step()
    # It would be in time after the first, which is expected to be much shorter.
    begun_s = site.clock()
    site.submit(2, 100, ttft_deadline_s=2.5)
    site.run()
    failure = site.failure(2)
    assert failure.reason is FailureReason.TTFT_DEADLINE_UNREACHABLE
    # 110 ms before the deadline, reported by the next step.
    assert begun_s + 2.39 - 1e-9 <= failure.at_s <= begun_s + 2.39 + 0.0101
    assert failure.estimate_s is not None
    assert failure.retry_after_s is not None
    assert isinstance(site.ends[1], Completed)


def test_no_compute_is_spent_on_a_request_predicted_late_in_the_batch() -> None:
    site = FixedCostEngine(num_seqs=2)
    site.submit(1, 1000, max_tokens=2)
    site.step()
    # Alone it would take 60 ms, but the prompt in prefill has the budget of the next steps.
    site.submit(2, 50, ttft_deadline_s=0.08)
    site.run()
    assert site.failure(2).reason is FailureReason.TTFT_DEADLINE_UNREACHABLE
    assert 2 not in site.admitted


def test_nothing_is_predicted_while_the_cost_is_not_known() -> None:
    site = FixedCostEngine(known_cost=None, is_settled=False)
    site.submit(1, 100, ttft_deadline_s=0.05)
    site.run()
    assert 1 in site.queued
    assert site.queued[1][0].estimated_queue_s is None
    # Its step ended too late, but a running request is not dropped for that.
    assert isinstance(site.ends[1], Completed)


def test_cost_is_learnt_from_the_steps() -> None:
    site = FixedCostEngine(known_cost=None)
    for key in range(2, 42):
        site.submit(key, 10 + 2 * key)
        site.run()
    fit = site.engine.sizing.fit
    assert fit.is_trusted
    step = {"num_prefill_tokens": 100, "num_decodes": 0, "num_context_tokens": 100}
    assert fit.step_time_s(**step) == pytest.approx(0.11, rel=0.1)
    site.submit(50, 100, ttft_deadline_s=0.05)
    site.step()
    assert site.failure(50).reason is FailureReason.TTFT_DEADLINE_UNREACHABLE


def test_without_prediction_a_deadline_ends_a_request_when_it_passes() -> None:
    site = FixedCostEngine(deadline_admission=False)
    site.submit(1, 300, ttft_deadline_s=0.15)
    site.run()
    failure = site.failure(1)
    assert failure.reason is FailureReason.TTFT_DEADLINE_EXCEEDED
    assert 1 in site.admitted


def test_a_time_limit_is_no_failure_and_not_predicted() -> None:
    site = FixedCostEngine()
    site.submit(1, 300, time_limit_s=0.15)
    site.run()
    assert site.ends[1].reason is FinishReason.TIME_LIMIT


def test_a_prefix_that_another_request_may_compute_counts_as_found() -> None:
    site = FixedCostEngine(num_seqs=2)
    site.submit(1, 1000, hashed=True, max_tokens=1)
    site.step()
    # With all of its tokens to compute it would take 440 ms alone.
    site.submit(2, 400, hashed=True, ttft_deadline_s=0.4)
    site.submit(3, 400, ttft_deadline_s=0.4)
    site.run()
    assert 2 in site.queued
    assert 3 not in site.queued


def test_a_full_queue_returns_a_retry_time() -> None:
    site = FixedCostEngine(num_seqs=1, max_num_waiting=2)
    site.submit(1, 100, max_tokens=50)
    site.step()
    for key in (2, 3, 4):
        site.submit(key, 100)
    site.step()
    failure = site.failure(4)
    assert failure.reason is FailureReason.QUEUE_FULL
    assert failure.estimate_s is not None
    assert failure.estimate_s > 0.2
    assert failure.retry_after_s is not None
    assert 0.1 <= failure.retry_after_s < failure.estimate_s


def test_an_accepted_request_has_its_position_and_its_wait() -> None:
    site = FixedCostEngine(num_seqs=1, order=SchedulingOrder.FCFS)
    for key in range(1, 5):
        site.submit(key, 100, max_tokens=1)
    site.run()
    reported = [site.queued[key] for key in range(1, 5)]
    assert [len(one) for one in reported] == [1, 1, 1, 1]
    assert [one[0].num_ahead for one in reported] == [0, 1, 2, 3]
    waits_s = [one[0].estimated_queue_s for one in reported]
    assert waits_s[0] == 0.0
    assert waits_s[3] == pytest.approx(0.33, rel=0.2)


def test_a_deadline_that_has_passed_at_submission_is_reported_as_such() -> None:
    site = FixedCostEngine()
    site.submit(1, 10, deadline_s=0.0)
    site.step()
    assert site.failure(1).reason is FailureReason.DEADLINE_EXCEEDED


def test_all_outputs_of_a_request_are_rejected_with_their_leader() -> None:
    site = FixedCostEngine()
    now = site.clock()
    leader = make_spec(1, prompt=[1] * 100, ttft_deadline_s=now + 0.05, arrival_s=now)
    follower = replace(leader, key=2, leader_key=1, output_index=1, ttft_deadline_s=now + 9.0)
    site.engine.submit((leader, follower))
    site.step()
    assert site.failure(1).reason is site.failure(2).reason
    assert not site.engine.has_work
