"""The parts of a plan: how it searches, which window of a trace it uses, when targets are met, and
which settings a candidate has.
"""

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.plan.candidates import Candidate, candidates_from_json
from penstock.tools.plan.lower_bound import lower_bound
from penstock.tools.plan.plan import least_replicas
from penstock.tools.plan.target import PlanTarget, evaluate
from penstock.tools.plan.window import busiest_window
from penstock.tools.simulation.cluster import ClusterConfig, simulate_cluster
from penstock.tools.simulation.routing import RouterKind
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.targets import Targets

BASE = Candidate(name="base", replica=SimulationConfig(policy=BatchingPolicy.FAIR), price=2.0)


def asks(arrival_s: float, num_output: int = 1, num_prompt: int = 8) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output
    )


class ThresholdPredicate:
    """A predicate that is true for the given numbers, and for all from `or_from` on. `calls`: the
    numbers for which it was called, in order.
    """

    def __init__(self, *numbers: int, or_from: float = math.inf) -> None:
        self._numbers = numbers
        self._or_from = or_from
        self.calls: list[int] = []

    def __call__(self, num: int) -> bool:
        self.calls.append(num)
        return num in self._numbers or num >= self._or_from


@pytest.mark.parametrize("first_guess", [1, 2, 7, 30, 64, 100])
@pytest.mark.parametrize("answer", [1, 2, 6, 7, 8, 33, 63, 64])
def test_the_least_number_that_holds_is_found_and_the_one_below_was_tried(
    answer: int, first_guess: int
) -> None:
    meets = ThresholdPredicate(or_from=answer)

    assert least_replicas(meets, first_guess=first_guess, max_replicas=64) == answer
    assert len(set(meets.calls)) == len(meets.calls)
    assert answer in meets.calls
    assert answer == 1 or answer - 1 in meets.calls
    assert all(1 <= num <= 64 for num in meets.calls)
    assert len(meets.calls) <= 13


def test_a_good_guess_takes_two_trials() -> None:
    meets = ThresholdPredicate(or_from=20)

    assert least_replicas(meets, first_guess=20, max_replicas=64) == 20
    assert meets.calls == [20, 19]


def test_none_when_the_most_fails() -> None:
    meets = ThresholdPredicate()

    assert least_replicas(meets, first_guess=3, max_replicas=9) is None
    assert 9 in meets.calls


def test_a_predicate_that_is_not_monotone_ends_the_search_at_a_boundary() -> None:
    meets = ThresholdPredicate(3, 4, 8, 9, or_from=12)

    found = least_replicas(meets, first_guess=6, max_replicas=16)

    assert found in (3, 8, 12)
    assert found is not None
    assert {found, found - 1} <= set(meets.calls)


def test_a_search_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="max_replicas"):
        least_replicas(ThresholdPredicate(), first_guess=1, max_replicas=0)


def test_the_window_is_where_the_tokens_are() -> None:
    trace = [asks(0.0), asks(1.0), asks(20.0, 50), asks(24.0, 60), asks(31.0, 70), asks(50.0, 90)]

    window = busiest_window(trace, 10.0)

    assert (window.start_s, window.end_s) == (24.0, 34.0)
    assert [request.arrival_s for request in window.requests] == [0.0, 7.0]
    assert (window.num_left_out, window.num_trace_requests, window.trace_s) == (4, 6, 50.0)
    assert window.requests_per_s == 0.2


def test_a_short_trace_is_taken_whole() -> None:
    window = busiest_window([asks(5.0), asks(9.0)], 600.0)

    assert window.num_left_out == 0
    assert [request.arrival_s for request in window.requests] == [0.0, 4.0]
    assert window.requests_per_s == 0.5
    assert busiest_window([asks(5.0)], math.inf).requests_per_s == 1.0


def run_of(trace: list[TraceRequest], target: PlanTarget, **fields: Any) -> Any:
    cost = CostModel(step_s=1.0, prefill_token_s=0.1, decode_slot_s=0.0, context_token_s=0.0)
    config = SimulationConfig(
        cost=cost,
        targets=Targets(ttft_s=target.ttft_p99_s, itl_s=target.itl_p99_s),
        num_blocks=64,
        **fields,
    )
    return simulate_cluster(trace, ClusterConfig(replica=config, num_replicas=1))


def test_one_request_in_a_hundred_may_be_late() -> None:
    # A step of 1.8 s for each; the long prompt takes 1 s + 10 s.
    trace = [asks(20.0 * i) for i in range(99)] + [asks(2000.0, num_prompt=100)]
    target = PlanTarget(ttft_p99_s=2.0, itl_p99_s=1.0)

    result = evaluate(run_of(trace, target), target)

    assert result.ttft_p99_s == pytest.approx(1.8)
    assert result.good_share == 0.99
    assert result.meets
    strict = dataclasses.replace(target, good_share=0.995)
    assert evaluate(run_of(trace, strict), strict).misses == ("good share",)
    late = evaluate(run_of([*trace, asks(3000.0, num_prompt=100)], target), target)
    assert late.misses == ("p99 TTFT",)
    assert late.ttft_p99_s == pytest.approx(11.0)


def test_a_request_with_slow_gaps_is_not_smooth() -> None:
    trace = [asks(0.0, 5)]
    target = PlanTarget(ttft_p99_s=2.0, itl_p99_s=0.9)

    result = evaluate(run_of(trace, target), target)

    assert result.smooth_share == 0.0
    assert result.misses == ("p99 ITL",)
    assert evaluate(
        run_of(trace, PlanTarget(ttft_p99_s=2.0, itl_p99_s=1.1)),
        PlanTarget(ttft_p99_s=2.0, itl_p99_s=1.1),
    ).meets


def test_requests_that_do_not_meet_take_the_lower_bound() -> None:
    target = PlanTarget(ttft_p99_s=1.0, itl_p99_s=0.9, good_share=0.5)
    trace = [asks(100.0 * i, 3, 8 + i) for i in range(5)]
    run = run_of(trace, target)

    bound = lower_bound(trace, run.config.replica, target)

    assert bound.ttft_p99_s == pytest.approx(evaluate(run, target).ttft_p99_s)
    assert bound.itl_p99_s == pytest.approx(1.0)
    assert bound.misses == evaluate(run, target).misses == ("p99 TTFT", "p99 ITL", "good share")
    met = PlanTarget(ttft_p99_s=evaluate(run, target).ttft_p99_s, itl_p99_s=1.0, good_share=1.0)
    assert lower_bound(trace, run.config.replica, met).misses == ()


def test_the_lower_bound_counts_shared_blocks_as_cached() -> None:
    target = PlanTarget(ttft_p99_s=1.5, itl_p99_s=1.5)
    own = msgspec.structs.replace(
        asks(0.0, num_prompt=32), prefix_ids=(1, 2), prefix_block_tokens=16
    )
    trace = [own, msgspec.structs.replace(own, arrival_s=50.0, prefix_ids=(1, 3))]
    run = run_of(trace, target)

    assert lower_bound(trace, run.config.replica, target).ttft_p99_s == pytest.approx(2.6)
    cold = dataclasses.replace(run.config.replica, has_prefix_caching=False)
    assert lower_bound(trace, cold, target).ttft_p99_s == pytest.approx(4.2)
    assert evaluate(run, target).ttft_p50_s == pytest.approx(2.6)


def test_a_cancelled_request_bounds_no_gap() -> None:
    target = PlanTarget(ttft_p99_s=9.0, itl_p99_s=0.9)
    trace = [msgspec.structs.replace(asks(0.0, 5), deadline_s=1.7)]
    run = run_of(trace, target)

    assert evaluate(run, target).smooth_share == 1.0
    assert lower_bound(trace, run.config.replica, target).misses == ()


def test_a_request_without_a_token_has_missed_everything() -> None:
    trace = [asks(0.0, 20), msgspec.structs.replace(asks(0.1, 3), deadline_s=0.5)]
    target = PlanTarget(ttft_p99_s=100.0, itl_p99_s=2.0)

    # One place, and the first has it for 20 steps.
    result = evaluate(run_of(trace, target, max_num_seqs=1), target)

    assert result.ttft_p99_s == math.inf
    assert result.smooth_share == 0.5
    assert result.misses == ("p99 TTFT", "p99 ITL")


def test_time_outside_the_engine_counts_to_ttft() -> None:
    target = PlanTarget(ttft_p99_s=2.0, itl_p99_s=2.0)

    assert evaluate(run_of([asks(0.0)], target, front_s=0.1), target).meets
    assert not evaluate(run_of([asks(0.0)], target, front_s=0.3), target).meets


def test_a_run_that_counted_against_another_target_is_rejected() -> None:
    target = PlanTarget(ttft_p99_s=2.0, itl_p99_s=2.0)

    with pytest.raises(ValueError, match="another target"):
        evaluate(run_of([asks(0.0)], target), PlanTarget(ttft_p99_s=2.0, itl_p99_s=1.0))


@pytest.mark.parametrize(
    "fields",
    [{"ttft_p99_s": 0.0}, {"itl_p99_s": math.inf}, {"good_share": 0.0}, {"good_share": 1.1}],
)
def test_invalid_targets_are_named(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        PlanTarget(**{"ttft_p99_s": 1.0, "itl_p99_s": 1.0, **fields})


def test_a_candidate_is_the_base_with_its_own_changes() -> None:
    (found,) = candidates_from_json(
        [
            {
                "name": "big",
                "price": 5,
                "num_blocks": 99,
                "max_num_batched_tokens": 4096,
                "target_itl_ms": 50,
                "front_ms": 2,
                "admission_policy": "guaranteed_no_evict",
                "cost": {"step_s": 0.5},
                "router": "prefix_aware",
                "overload_factor": 2,
            }
        ],
        BASE,
    )

    assert (found.name, found.price) == ("big", 5)
    assert found.replica.num_blocks == 99
    assert found.replica.policy is BatchingPolicy.FAIR
    assert found.replica.scheduler.max_num_batched_tokens == 4096
    assert found.replica.scheduler.target_itl_s == 0.05
    assert found.replica.front_s == 0.002
    assert found.replica.scheduler.admission_policy is AdmissionPolicy.GUARANTEED_NO_EVICT
    assert found.replica.scheduler.max_num_waiting == BASE.replica.scheduler.max_num_waiting
    assert found.replica.cost == dataclasses.replace(BASE.replica.cost, step_s=0.5)
    assert found.routing.router is RouterKind.PREFIX_AWARE
    assert found.routing.overload_factor == 2.0
    assert candidates_from_json([{"name": "same"}], BASE) == (
        dataclasses.replace(BASE, name="same"),
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must be an array"),
        ([], "at least one"),
        ([3], r"\[0\] must be an object"),
        ([{"price": 3}], r"\[0\].name must be a string"),
        ([{"name": ""}], "name must not be empty"),
        ([{"name": "a"}, {"name": "a"}], "same name"),
        ([{"name": "a", "price": None}, {"name": "b"}], "for all candidates or for none"),
        ([{"name": "a", "price": "3"}], r"\[0\].price must be a number"),
        ([{"name": "a", "price": -1}], "price must be above 0"),
        ([{"name": "a", "blocks": 1}], r"\[0\].blocks is unknown"),
        (
            [{"name": "a", "x": 1}],
            r"\[0\].x is unknown; the most similar are .*, .*, .*; docs/settings.md lists all 55",
        ),
        ([{"name": "a", "num_blocks": "1"}], r"\[0\].num_blocks must be an integer"),
        ([{"name": "a", "num_blocks": 0}], "num_blocks must be in 1..16777216"),
        ([{"name": "a", "router": "best"}], r"\[0\].router must be one of"),
        ([{"name": "a", "watermark": 2}], "watermark must be at least 0"),
        ([{"name": "a", "cost": {"step": 1}}], r"\[0\].cost.step is unknown"),
        ([{"name": "a", "cost": 1}], r"\[0\].cost must be an object"),
        ([{"name": "a", "order": "fcfs"}], "is set by policy"),
        ([{"name": "a", "targets": {}}], "are set for the plan"),
        ([{"name": "a", "scheduler": {}}], "directly into the candidate"),
    ],
)
def test_an_invalid_setting_of_a_candidate_is_named(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidates_from_json(data, BASE)
