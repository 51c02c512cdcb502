"""The inputs of a deadline prediction, and when it is repeated."""

from typing import Any

import pytest

from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.contention import Contention
from penstock.scheduler.cost_model import StepError
from penstock.scheduler.events import Failed
from penstock.scheduler.forecast import RunningLoad
from penstock.scheduler.request import FailureReason, FinishReason, SamplingParams
from penstock.scheduler.step_fit import StepFit
from unit.scheduler.fixed_cost_engine import BUDGET, FixedCostEngine

STEP_S = 0.01
ALONE_S = 0.11
"""A prompt of 100 tokens on an idle machine."""


def set_bias(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Set the measured bias of predictions to -`error`: predicted times are too long by this
    fraction.
    """
    for kind in ("prefill_error", "decode_error"):
        monkeypatch.setattr(StepFit, kind, property(lambda _: StepError(bias=-error)))


@pytest.mark.parametrize(("error", "is_rejected"), [(0.0, True), (0.5, False)])
def test_on_arrival_the_predicted_wait_is_reduced_by_the_known_error(
    error: float, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FixedCostEngine(num_seqs=1, order=SchedulingOrder.FCFS)
    set_bias(monkeypatch, error)
    for key in range(1, 11):
        site.submit(key, 100, max_tokens=1)
    # Ten times 110 ms ahead of it, or as little as half of that.
    assert (site.submit(20, 100, ttft_deadline_s=0.9) is None) is is_rejected
    assert site.submit(21, 100, ttft_deadline_s=0.4) is None


@pytest.mark.parametrize(("error", "is_dropped"), [(0.0, True), (0.5, False)])
@pytest.mark.parametrize(
    ("num_under_way", "patience_s", "least_s"),
    # Its own 110 ms, and as much for what shares its steps; in the best case half of both.
    [(0, 0.08, 0.05), (1000, 0.15, 0.10)],
    ids=["its prefill", "prompts under way"],
)
def test_at_admission_the_predicted_prefill_is_reduced_by_the_known_error(
    num_under_way: int,
    patience_s: float,
    least_s: float,
    error: float,
    is_dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FixedCostEngine()
    if num_under_way:
        site.submit(1, num_under_way)
        site.step()
    set_bias(monkeypatch, error)
    request = site.request(2, 100, ttft_deadline_s=patience_s)
    rejection = site.engine.predictor.check_at_admission(request, [], site.clock())
    assert (rejection is not None) is is_dropped
    late = site.request(3, 100, ttft_deadline_s=least_s)
    assert site.engine.predictor.check_at_admission(late, [], site.clock()) is not None


def test_a_long_prompt_under_way_weighs_no_more_than_the_prompt_it_shares_steps_with() -> None:
    site = FixedCostEngine()
    site.submit(1, 1000)
    site.step()
    request = site.request(2, 100, ttft_deadline_s=0.3)
    assert site.engine.predictor.check_at_admission(request, [], site.clock()) is None


def test_at_admission_the_output_is_no_longer_than_it_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FixedCostEngine()
    set_bias(monkeypatch, 0.0)
    request = site.request(1, 100, min_tokens=3, max_tokens=100, deadline_s=0.14)
    assert site.engine.predictor.check_at_admission(request, [], site.clock()) is None
    longer = site.request(2, 100, min_tokens=5, max_tokens=100, deadline_s=0.14)
    rejection = site.engine.predictor.check_at_admission(longer, [], site.clock())
    assert rejection is not None
    assert rejection.reason is FailureReason.DEADLINE_UNREACHABLE


@pytest.mark.parametrize(
    ("num_prompt", "min_tokens", "left_s", "num_reckoned"),
    # Two steps at least, two more for each of a whole budget, one for each token that must come;
    # and twenty times what they take.
    [
        (10, 0, 0.39, 1),
        (10, 0, 0.41, 0),
        (3 * BUDGET, 0, 1.59, 1),
        (3 * BUDGET, 0, 1.61, 0),
        (10, 20, 4.39, 1),
        (10, 20, 4.41, 0),
    ],
)
def test_nothing_is_predicted_for_a_distant_deadline(
    num_prompt: int,
    min_tokens: int,
    left_s: float,
    num_reckoned: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FixedCostEngine()
    assert site.engine.sizing.last_step_s == pytest.approx(STEP_S)
    calls: list[bool] = []
    load = Contention.load

    def noted(contention: Contention, *, has_slot: bool = False) -> RunningLoad:
        calls.append(has_slot)
        return load(contention, has_slot=has_slot)

    monkeypatch.setattr(Contention, "load", noted)
    request = site.request(1, num_prompt, min_tokens=min_tokens, max_tokens=20, deadline_s=left_s)
    assert site.engine.predictor.check_at_admission(request, [], site.clock()) is None
    assert len(calls) == num_reckoned


# The requests ahead: all of the same tenant are certain, other tenants take turns.


def fill_queue(site: FixedCostEngine) -> None:
    for key in range(1, 6):
        site.submit(key, 100, max_tokens=1, tenant="others")


@pytest.mark.parametrize(("patience_s", "is_rejected"), [(0.15, True), (0.3, False)])
def test_on_arrival_the_prediction_includes_turns_of_other_tenants(
    patience_s: float, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FixedCostEngine(num_seqs=1)
    set_bias(monkeypatch, 0.0)
    fill_queue(site)
    request = site.submit(9, 100, max_tokens=1, tenant="own", ttft_deadline_s=patience_s)
    site.step()
    assert (request is None) is is_rejected
    if request is None:
        end = site.ends[9]
        assert isinstance(end, Failed)
        assert end.estimate_s == pytest.approx(2 * ALONE_S, abs=STEP_S)
    else:
        assert site.queued[9][0].num_ahead == 1
        assert site.queued[9][0].estimated_queue_s == pytest.approx(ALONE_S, abs=STEP_S)


@pytest.mark.parametrize("what", ["limit_rejection", "dropped"])
def test_the_estimate_in_a_rejection_includes_turns_of_other_tenants(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FixedCostEngine(num_seqs=1)
    set_bias(monkeypatch, 0.0)
    fill_queue(site)
    now = site.clock()
    request = site.request(9, 100, max_tokens=1, tenant="own", ttft_deadline_s=0.1)
    if what == "limit_rejection":
        rejection = site.engine.predictor.limit_rejection(request, FailureReason.QUEUE_FULL, now)
    else:
        rejection = site.engine.predictor.expired_rejection(request, now)
    assert rejection.estimate_s == pytest.approx(2 * ALONE_S, abs=STEP_S)


# Prefixes.


def test_a_prefix_that_another_request_may_compute_still_counts_when_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FixedCostEngine(num_seqs=1)
    set_bias(monkeypatch, 0.0)
    site.submit(1, 4, max_tokens=300)
    site.step()
    site.submit(2, 400, hashed=True)
    due_s = site.clock() + 2.0
    waiting = site.submit(3, 400, hashed=True, ttft_deadline_s=2.0)
    assert waiting is not None
    assert site.engine.predictor.latest_admission_s(waiting) == pytest.approx(due_s)
    # 440 ms alone, from when on it has nothing to expect for but that prefix.
    site.run_until(due_s - 0.3)
    assert 3 not in site.ends
    site.engine.cancel(2)
    assert site.engine.predictor.latest_admission_s(waiting) == pytest.approx(due_s - 0.44)
    site.run()
    assert site.ends[3].reason is FailureReason.TTFT_DEADLINE_EXCEEDED


def test_a_request_with_an_uncomputed_prefix_is_dropped_when_it_must_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FixedCostEngine(num_seqs=1)
    set_bias(monkeypatch, 0.0)
    for _ in range(1000):
        site.engine.completion.lengths.observe(5)
    site.submit(1, 4, max_tokens=300)
    site.step()
    due_s = site.clock() + 2.0
    site.submit(3, 400, hashed=True, ttft_deadline_s=2.0)
    site.run()
    end = site.ends[3]
    assert end.reason is FailureReason.TTFT_DEADLINE_UNREACHABLE
    assert end.at_s == pytest.approx(due_s - 0.44, abs=0.02)


@pytest.mark.parametrize(("num_logprobs", "is_rejected"), [(-1, False), (0, True)])
def test_a_cached_prefix_is_taken_off_the_prompt(
    num_logprobs: int, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FixedCostEngine(num_seqs=1)
    set_bias(monkeypatch, 0.0)
    site.submit(1, 400, hashed=True)
    site.run()
    site.submit(2, 10, max_tokens=50)
    site.step()
    # Logprobs of the prompt need all of it computed.
    sampling = SamplingParams(num_prompt_logprobs=num_logprobs)
    request = site.request(3, 402, hashed=True, ttft_deadline_s=0.4, sampling=sampling)
    matched = site.engine.cache.match(request)
    assert len(matched) == (0 if is_rejected else 20)
    rejection = site.engine.predictor.check_at_admission(request, matched, site.clock())
    assert (rejection is not None) is is_rejected
    waiting = site.submit(3, 402, hashed=True, sampling=sampling)
    assert waiting is not None
    assert waiting.num_uncached_tokens == (402 if is_rejected else 2)


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_prefix_that_another_request_computes_is_not_reused_for_prompt_logprobs(
    is_hashed: bool,
) -> None:
    site = FixedCostEngine()
    site.submit(1, 600, hashed=is_hashed, max_tokens=5)
    site.step()
    sampling = SamplingParams(num_prompt_logprobs=0)
    site.submit(2, 400, hashed=True, ttft_deadline_s=0.2, sampling=sampling)
    submitted_s = site.clock()
    site.run()
    end = site.ends[2]
    assert isinstance(end, Failed)
    assert end.at_s == submitted_s
    assert end.reason is FailureReason.TTFT_DEADLINE_UNREACHABLE


# What an admission takes.


@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [(AdmissionPolicy.MAX_UTILIZATION, 1), (AdmissionPolicy.GUARANTEED_NO_EVICT, 5)],
)
def test_a_request_whose_blocks_are_reserved_counts_with_all_of_them(
    policy: AdmissionPolicy, num_blocks: int
) -> None:
    site = FixedCostEngine(num_seqs=1, admission_policy=policy)
    site.submit(1, 10)
    site.step()
    site.submit(2, 10, max_tokens=90)
    behind = site.request(3, 10, max_tokens=90)
    assert site.engine.queue.ahead_of(behind, 10).num_blocks == num_blocks
    assert site.engine.predictor._demand(behind, []).num_blocks == num_blocks


def test_blocks_that_admission_keeps_free_are_waited_for() -> None:
    # Admissions may take 6 blocks while a request runs, which takes 5 of them and more.
    site = FixedCostEngine(watermark=0.97)
    site.submit(1, 100, max_tokens=100)
    site.step()
    submitted_s = site.clock()
    site.submit(2, 100, max_tokens=1, ttft_deadline_s=0.3)
    site.submit(3, 100, max_tokens=1)
    site.run()
    assert site.admitted[3].at_s == pytest.approx(submitted_s + 0.99, abs=2 * STEP_S)
    # The queue was empty, but the wait is known: the other one is not kept waiting in vain.
    estimated_queue_s = site.queued[3][0].estimated_queue_s
    assert estimated_queue_s is not None
    assert estimated_queue_s > 0.3
    assert site.ends[2].at_s == submitted_s


def test_blocks_that_running_requests_use_count_once() -> None:
    site = FixedCostEngine(num_seqs=1)
    site.submit(1, 100, max_tokens=100, hashed=True)
    site.step()
    site.step()
    behind = site.request(9, 10)
    site.submit(2, 102, hashed=True)
    assert site.engine.queue.ahead_of(behind, 10).num_blocks == 1
    site.submit(3, 102)
    assert site.engine.queue.ahead_of(behind, 10).num_blocks == 1 + 6


# When time alone ends it.


@pytest.mark.parametrize(
    "options",
    [{}, {"deadline_admission": False}, {"known_cost": None, "is_settled": False}],
)
def test_a_time_limit_ends_a_waiting_request(options: dict[str, Any]) -> None:
    site = FixedCostEngine(num_seqs=1, **options)
    site.submit(1, 4, max_tokens=300)
    site.step()
    begun_s = site.clock()
    site.submit(2, 10, time_limit_s=1.0, deadline_s=9.0)
    site.run()
    end = site.ends[2]
    assert end.reason is FinishReason.TIME_LIMIT
    assert end.at_s == pytest.approx(begun_s + 1.0, abs=2 * STEP_S)


def test_a_time_limit_ends_a_request_that_was_checked_again_before_it() -> None:
    site = FixedCostEngine(num_seqs=1)
    site.submit(1, 4, max_tokens=300)
    site.step()
    begun_s = site.clock()
    site.submit(2, 400, hashed=True)
    # Asked again 440 ms before its deadline, it may still find a prefix.
    site.submit(3, 400, hashed=True, ttft_deadline_s=2.0, time_limit_s=1.8)
    site.run()
    end = site.ends[3]
    assert end.reason is FinishReason.TIME_LIMIT
    assert end.at_s == pytest.approx(begun_s + 1.8, abs=2 * STEP_S)


# A cost model of long ago.


@pytest.mark.parametrize(("idle_s", "is_tried"), [(0.9, False), (1.1, True)])
def test_after_an_idle_time_the_first_request_is_admitted_as_a_trial(
    idle_s: float, is_tried: bool
) -> None:
    site = FixedCostEngine()
    site.clock.advance(idle_s)
    first = site.submit(1, 100, ttft_deadline_s=0.05)
    assert (first is not None) is is_tried
    assert site.submit(2, 100, ttft_deadline_s=0.05) is None
    site.run()
    assert (1 in site.admitted) is is_tried
    assert site.submit(3, 100, ttft_deadline_s=0.05) is None
