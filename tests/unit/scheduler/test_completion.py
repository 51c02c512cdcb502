"""Whether the whole output of a request will meet its deadline, predicted from the lengths of
earlier outputs at arrival and later.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.completion import PrefillCredit, Slowdown, StandingQueues, TokenTime
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.forecast import RunningLoad
from penstock.scheduler.output_lengths import Exploration
from penstock.scheduler.request import FailureReason
from penstock.scheduler.step_fit import StepFit
from unit.scheduler.fixed_cost_engine import COST, FixedCostEngine


def site_with(lengths: int, *, num: int = 60, tenant: str = "", **options: Any) -> FixedCostEngine:
    """Return an engine that has observed `num` outputs of `lengths` tokens each. Its decode steps
    take 10 ms.
    """
    site = FixedCostEngine(**({"min_deadline_chance": 0.1} | options))
    for _ in range(num):
        site.engine.completion.lengths.observe(lengths, tenant=tenant, max_tokens=500)
    return site


def decode_alone(site: FixedCostEngine) -> None:
    """Run a single request for four seconds, at 10 ms per output token."""
    site.submit(900_000, 1, max_tokens=400)
    site.run()


def test_an_answer_that_is_probably_too_long_is_rejected_with_its_chance() -> None:
    site = site_with(200)
    assert site.submit(1, 100, max_tokens=500, deadline_s=1.0) is None
    site.step()
    failure = site.failure(1)
    assert failure.reason is FailureReason.DEADLINE_UNREACHABLE
    assert failure.chance is not None
    assert 0.0 <= failure.chance < 0.1
    assert failure.estimate_s is not None
    assert failure.estimate_s >= 1.0
    assert failure.deadline_s == pytest.approx(1.0)
    assert failure.retry_after_s == math.inf, "an idle machine would take as long"
    assert site.submit(2, 100, max_tokens=500, deadline_s=4.0) is not None


def test_with_chance_zero_only_certain_bounds_count() -> None:
    site = site_with(200, min_deadline_chance=0.0)
    assert site.submit(1, 100, max_tokens=500, deadline_s=1.0) is not None


def test_a_short_limit_is_certain_whatever_was_learned() -> None:
    site = site_with(200)
    assert site.submit(1, 100, max_tokens=5, deadline_s=0.2) is not None
    site.run()
    assert isinstance(site.ends[1], Completed)


def test_before_outputs_have_ended_no_request_is_rejected() -> None:
    site = FixedCostEngine(min_deadline_chance=0.1, is_settled=False)
    assert site.submit(1, 100, max_tokens=500, deadline_s=1.0) is not None


def test_the_deadline_of_an_output_of_certain_length_is_predicted_without_samples() -> None:
    """The deadline leaves time for 200 tokens, but not while other prompts are in prefill."""
    for min_tokens in (0, 200):
        site = FixedCostEngine(min_deadline_chance=0.1)
        site.submit(1, 1900, max_tokens=5)
        for _ in range(15):
            site.step()
        request = site.submit(2, 1, max_tokens=200, min_tokens=min_tokens, deadline_s=2.2)
        assert (request is None) is (min_tokens == 200)


def test_a_running_output_of_certain_length_ends_when_it_must_be_late() -> None:
    site = FixedCostEngine(min_deadline_chance=0.1)
    begun_s = site.clock()
    site.submit(1, 1, max_tokens=200, min_tokens=200, deadline_s=3.0)
    site.step()
    site.submit(2, 1900, max_tokens=5)
    site.run()
    failure = site.failure(1)
    assert failure.reason is FailureReason.DEADLINE_UNREACHABLE
    assert failure.at_s < begun_s + 2.5


def test_an_output_of_certain_length_is_no_sample_for_others() -> None:
    site = FixedCostEngine(min_deadline_chance=0.1, num_seqs=32)
    for key in range(1, 33):
        site.submit(key, 1, max_tokens=20, min_tokens=20, stop_ids=(95,))
    site.run()
    assert site.engine.completion.lengths.num_seen_of("") == 0


def test_outputs_of_other_tenants_are_predicted_from_their_own_samples() -> None:
    site = site_with(200, tenant="long")
    for _ in range(60):
        site.engine.completion.lengths.observe(5, tenant="short", max_tokens=500)
    options: dict[str, Any] = {"max_tokens": 500, "deadline_s": 1.0}
    assert site.submit(1, 100, tenant="long", **options) is None
    assert site.submit(2, 100, tenant="short", **options) is not None


def test_a_running_request_is_ended_when_it_can_no_longer_meet_its_deadline() -> None:
    site = site_with(20)
    begun_s = site.clock()
    site.submit(1, 100, max_tokens=400, deadline_s=2.5)
    site.step()
    assert 1 in site.admitted
    # Meanwhile outputs of 300 tokens are observed.
    for _ in range(600):
        site.engine.completion.lengths.observe(300, max_tokens=400)
    site.run()
    failure = site.failure(1)
    assert failure.reason is FailureReason.DEADLINE_UNREACHABLE
    assert failure.at_s < begun_s + 1.0
    assert failure.chance is not None
    assert failure.chance < 0.1
    assert failure.residency is not None


def test_now_and_then_a_late_request_is_admitted_to_measure_its_length() -> None:
    site = site_with(200)
    taken = [
        site.submit(key, 100, max_tokens=500, deadline_s=1.0) is not None for key in range(1, 129)
    ]
    assert 1 <= sum(taken) <= 2


def test_trial_requests_are_counted_for_each_tenant() -> None:
    site = site_with(200, tenant="a")
    for _ in range(60):
        site.engine.completion.lengths.observe(200, tenant="b", max_tokens=500)
    options: dict[str, Any] = {"max_tokens": 500, "deadline_s": 1.0}
    for key in range(1, 64):
        assert site.submit(key, 100, tenant="a", **options) is None
    assert site.submit(64, 100, tenant="b", **options) is None
    assert site.submit(65, 100, tenant="a", **options) is not None


def test_outputs_of_a_new_tenant_are_not_predicted_from_another_tenant() -> None:
    site = site_with(200, tenant="hog", num_seqs=64)
    options: dict[str, Any] = {"max_tokens": 500, "deadline_s": 1.0}

    def num_taken(tenant: str, first_key: int) -> int:
        keys = range(first_key, first_key + 24)
        return sum(site.submit(key, 1, tenant=tenant, **options) is not None for key in keys)

    assert num_taken("hog", 100) == 0
    assert num_taken("new", 200) == 16, "until its own outputs end it has a bounded number"
    assert num_taken("newer", 300) == 16, "and each tenant its own"
    for _ in range(16):
        site.engine.completion.lengths.observe(5, tenant="new", max_tokens=500)
    assert num_taken("new", 400) == 24
    assert site.submit(1, 1, tenant="last", min_tokens=400, **options) is None, "that is certain"


def test_the_allowance_of_a_new_tenant_is_refilled() -> None:
    exploration = Exploration()
    assert sum(exploration.explores_new_tenant("a", 15, 5.0) for _ in range(100)) == 16
    assert 4 <= sum(exploration.explores_new_tenant("a", 15, 25.0) for _ in range(100)) <= 5
    assert not exploration.explores_new_tenant("b", 16, 25.0)


def test_the_number_of_new_tenants_admitted_without_prediction_is_limited() -> None:
    exploration = Exploration()
    assert sum(exploration.explores_new_tenant(str(index), 0, 5.0) for index in range(1000)) == 64
    assert exploration.explores_new_tenant("late", 0, 10.0)


def test_a_request_of_a_new_tenant_runs_until_its_deadline() -> None:
    """The request is neither dropped at admission nor ended early because of another tenant's
    output lengths.
    """
    site = site_with(300, tenant="hog", num=600)
    for key in (1, 2):
        site.submit(key, 1, tenant="new", max_tokens=400, deadline_s=2.5)
    site.run()
    assert [site.failure(key).reason for key in (1, 2)] == [FailureReason.DEADLINE_EXCEEDED] * 2


def test_all_outputs_of_a_new_tenants_request_are_judged_alike() -> None:
    site = site_with(200, tenant="hog")
    leader = site.spec(1, 10, tenant="new", max_tokens=500, deadline_s=1.0)
    site.engine.submit((leader, replace(leader, key=2, leader_key=1, output_index=1)))
    assert all(request.is_new for request in site.engine.requests.values())


def test_a_running_request_with_only_its_limit_is_no_sample_of_lengths() -> None:
    site = site_with(10, num=20, num_seqs=64, min_deadline_chance=0.5)
    for key in range(1, 61):
        site.submit(key, 1, max_tokens=400, stop_ids=())
    for _ in range(100):
        site.step()
    assert site.submit(99, 1, max_tokens=500, deadline_s=0.5) is not None


def test_a_standing_queue_admits_no_request_that_would_be_late() -> None:
    """After a burst, a request that may be late can still wait. If the queue is permanent, the
    request is rejected at once.
    """
    for is_standing in (False, True):
        site = FixedCostEngine(num_seqs=1, min_deadline_chance=0.1)
        lengths = site.engine.completion.lengths
        for index in range(200):
            lengths.observe(10 + index, max_tokens=500)
        for key in range(1, 4):
            site.submit(key, 100, max_tokens=10)
        standing = site.engine.completion.standing
        standing.note_arrival((0, ""), site.clock(), finds_queue=is_standing)
        site.clock.advance(30.0)
        standing.note_arrival((0, ""), site.clock(), finds_queue=is_standing)
        # Prompts admitted before had nothing to lose, so this one may lose some of its chance.
        site.engine.completion.credit.note(100_000, 1.0, site.clock())
        request = site.submit(9, 100, max_tokens=500, deadline_s=2.5)
        assert (request is None) is is_standing
        if is_standing:
            site.step()
            failure = site.ends[9]
            assert isinstance(failure, Failed)
            assert failure.chance is not None
            assert failure.chance > 0.1
            assert failure.retry_after_s is not None
            assert math.isfinite(failure.retry_after_s)


def test_the_chance_that_prompts_lose_to_others_is_bounded() -> None:
    credit = PrefillCredit()
    assert credit.min_share(100, 0.0) == pytest.approx(0.94)
    credit.note(1000, 1.0, 0.0)
    assert credit.min_share(100, 0.0) == pytest.approx(0.34), "60 tokens may be lost"
    credit.note(100, 0.4, 0.0)
    assert credit.min_share(100, 0.0) == pytest.approx(0.88, abs=0.01)
    assert credit.min_share(100, 600.0) == pytest.approx(0.94, abs=0.01)


def test_predicted_times_are_corrected_by_those_of_recent_requests() -> None:
    slowdown = Slowdown()
    assert slowdown.factor(0.0) == 1.0
    slowdown.note(10, taken_s=20.0, predicted_s=1.0, now=0.0)
    assert slowdown.factor(0.0) < 1.1, "one short prompt is no evidence"
    for _ in range(100):
        slowdown.note(10_000, taken_s=15.0, predicted_s=10.0, now=0.0)
    assert slowdown.factor(0.0) == pytest.approx(1.5, rel=0.01)
    for _ in range(200):
        slowdown.note(10_000, taken_s=15.0, predicted_s=10.0, now=60.0)
    for _ in range(300):
        slowdown.note(10_000, taken_s=5.0, predicted_s=10.0, now=60.0)
    assert slowdown.factor(60.0) == 1.0


@pytest.mark.parametrize("num_later", [0, 1])
def test_a_stall_slows_predictions_down_for_a_minute_at_most(num_later: int) -> None:
    slowdown = Slowdown()
    slowdown.note(1_000_000, taken_s=500.0, predicted_s=10.0, now=0.0)
    assert slowdown.factor(0.0) == 2.0, "not by how long the stall was"
    for second in range(1, 61):
        slowdown.note(num_later, taken_s=1.0, predicted_s=1.0, now=second)
    assert slowdown.factor(60.0) == pytest.approx(1.0, abs=0.01)
    assert slowdown.factor(600.0) == pytest.approx(1.0, abs=0.01)


def test_a_slowdown_under_steady_load_stays() -> None:
    slowdown = Slowdown()
    for second in range(300):
        slowdown.note(10_000, taken_s=15.0, predicted_s=10.0, now=second)
        assert slowdown.factor(second) > 1.4
    assert slowdown.factor(320.0) < 1.3


def test_a_slowdown_is_reported_until_it_has_faded() -> None:
    slowdown = Slowdown()
    slowdown.note(1_000_000, taken_s=20.0, predicted_s=10.0, now=0.0)
    wait_s = slowdown.seconds_until(1.5, 0.0)
    assert slowdown.factor(0.0) > 1.9
    assert slowdown.factor(wait_s) == pytest.approx(1.5, abs=0.01)
    assert slowdown.seconds_until(1.5, wait_s) == pytest.approx(0.0, abs=0.01)
    assert slowdown.seconds_until(0.9, wait_s) == 0.0, "it will not get there"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_request_takes_longer_than_predicted_by_what_comes_after_it(*, is_late: bool) -> None:
    site = site_with(40)
    decode_alone(site)
    site.submit(1, 100, max_tokens=500, min_tokens=60, deadline_s=2.0 if is_late else 20.0)
    for key in range(2, 62):
        site.step()
        site.submit(key, 90, max_tokens=1)
    site.run()
    assert isinstance(site.ends[1], Failed) is is_late
    assert site.engine.completion.slowdown.factor(site.clock()) > 1.01


def noted(site: FixedCostEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Return a list to which every further call of `Slowdown.note` appends its arguments."""
    notes: list[dict[str, float]] = []
    note = site.engine.completion.slowdown.note

    def recorded(_self: Slowdown, num_tokens: int, **times: float) -> None:
        notes.append({"num_tokens": num_tokens} | times)
        note(num_tokens, **times)

    monkeypatch.setattr(Slowdown, "note", recorded)
    return notes


def test_recorded_are_computed_tokens_and_the_prediction_before_its_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = site_with(40)
    decode_alone(site)
    site.submit(1, 200, max_tokens=1, hashed=True)
    site.run()
    slow(site)
    notes = noted(site, monkeypatch)
    site.submit(2, 300, max_tokens=60, min_tokens=60, deadline_s=20.0, hashed=True)
    site.run()
    # 100 tokens of prefill and 59 more of output, 10 ms a step.
    assert [note["num_tokens"] for note in notes] == [100]
    assert notes[0]["predicted_s"] == pytest.approx(0.11 + 0.59, rel=0.1)
    assert notes[0]["taken_s"] == pytest.approx(0.11 + 0.59, rel=0.1)


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_request_that_ends_in_its_prefill_counts_if_it_was_slow(
    monkeypatch: pytest.MonkeyPatch, *, is_stalled: bool
) -> None:
    site = site_with(40)
    notes = noted(site, monkeypatch)
    site.submit(1, 1400, max_tokens=100, deadline_s=15.0)
    site.step()
    if is_stalled:
        site.clock.advance(10.0)
    site.engine.cancel(1)
    site.run()
    assert isinstance(site.ends[1], Completed)
    assert len(notes) == is_stalled


def test_a_preempted_request_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_with(40)
    notes = noted(site, monkeypatch)
    request = site.submit(1, 100, max_tokens=60, min_tokens=60, deadline_s=8.0)
    for _ in range(20):
        site.step()
    assert request is not None
    assert request.predicted_time is not None
    site.engine.transitions.preempt(request, site.clock())
    site.run()
    assert isinstance(site.ends[1], Completed)
    assert notes == []


def slow(site: FixedCostEngine) -> None:
    """Record that recent requests took twice the predicted time."""
    site.engine.completion.slowdown.note(
        1_000_000, taken_s=20.0, predicted_s=10.0, now=site.clock()
    )


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "num_output", "deadline_s"),
    [(100, 100, 1.8), (1000, 2, 1.8)],
    ids=["decode", "prefill"],
)
def test_a_request_is_judged_by_the_corrected_times(
    num_prompt: int, num_output: int, deadline_s: float, *, is_slow: bool
) -> None:
    site = site_with(100)
    if is_slow:
        slow(site)
    request = site.submit(
        1, num_prompt, max_tokens=num_output, min_tokens=num_output, deadline_s=deadline_s
    )
    assert (request is None) is is_slow
    if is_slow:
        site.step()
        wait_s = site.failure(1).retry_after_s
        assert wait_s is not None
        assert 1.0 < wait_s < 60.0
        site.clock.advance(wait_s + 0.1)
        site.submit(2, 10)
        site.run()  # the first request after a second would be a trial
        assert site.submit(
            3, num_prompt, max_tokens=num_output, min_tokens=num_output, deadline_s=deadline_s
        )


def test_the_time_between_tokens_is_that_of_the_last_seconds() -> None:
    time = TokenTime(StepFit(COST))
    idle = RunningLoad()
    assert time.under_load(idle, 0.0) == pytest.approx(0.01)
    for step in range(1, 401):
        time.note_step(0.05, 0.05 * step)
    assert time.under_load(idle, 20.0) == pytest.approx(0.05)
    assert time.under_load(idle, 25.0) < 0.03, "idle time counts as fast"
    assert time.under_load(idle, 1000.0) == pytest.approx(0.01)


def test_a_step_that_leaves_decodes_out_is_time_without_a_token() -> None:
    time = TokenTime(StepFit(COST))
    for step in range(1, 801):
        time.note_step(0.05, 0.05 * step, has_paused=bool(step % 4))
    assert time.under_load(RunningLoad(), 40.0) == pytest.approx(0.2, rel=0.05)


def test_a_standing_queue_is_detected_by_its_waiting_time() -> None:
    queues, line = StandingQueues(), (0, "a")
    assert queues.share(line) == 0.0
    queues.note_arrival(line, 0.0, finds_queue=False)
    for _ in range(50):
        queues.note_arrival(line, 0.0, finds_queue=True)
    assert queues.share(line) == 0.0, "a burst is no queue that stands"
    queues.note_arrival(line, 60.0, finds_queue=True)
    assert queues.share(line) == 1.0
    queues.note_arrival(line, 120.0, finds_queue=False)
    assert queues.share(line) < 0.01
    assert queues.share((1, "a")) == 0.0
