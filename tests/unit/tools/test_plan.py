"""Plans with a known result: the servers take three seconds per request."""

import json
from pathlib import Path

import pytest

from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.plan.candidates import Candidate
from penstock.tools.plan.plan import Plan, PlanSearch, guessed_replicas, make_plan
from penstock.tools.plan.report import plan_charts, plan_json, plan_lines, write_plan_report
from penstock.tools.plan.target import PlanTarget
from penstock.tools.plan.window import busiest_window
from penstock.tools.simulation.settings import SimulationConfig

TARGET = PlanTarget(ttft_p99_s=1.5, itl_p99_s=1.5)
# One request a second, each of three tokens.
WINDOW = busiest_window(
    [TraceRequest(arrival_s=float(i), num_prompt_tokens=8, num_output_tokens=3) for i in range(60)],
    600.0,
)


def candidate(name: str, step_s: float = 1.0, price: float | None = None) -> Candidate:
    cost = CostModel(step_s=step_s, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)
    replica = SimulationConfig(cost=cost, max_num_seqs=1, num_blocks=64)
    return Candidate(name=name, replica=replica, price=price)


def planned(*candidates: Candidate, max_replicas: int = 8, num_curve_requests: int = 30) -> Plan:
    search = PlanSearch(max_replicas=max_replicas, num_curve_requests=num_curve_requests)
    return make_plan(WINDOW, candidates, TARGET, search)


def test_three_seconds_of_work_a_second_take_three_replicas() -> None:
    plan = planned(candidate("slow"))

    (found,) = plan.candidates
    assert found.num_replicas == 3
    assert found.is_monotone
    holds = {result.num_replicas: result.meets for result in found.tried}
    assert holds == {1: False, 2: False, 3: True, 4: True}
    assert found.result.ttft_p99_s == pytest.approx(1.0)
    assert plan.best is found


def test_targets_are_missed_beyond_the_capacity_of_a_replica() -> None:
    (found,) = planned(candidate("slow")).candidates

    held = [point.offered_per_s for point in found.curve if point.result.meets]
    failed = [point.offered_per_s for point in found.curve if not point.result.meets]
    assert max(held) == pytest.approx(1 / 3, rel=0.05)
    assert min(failed) > max(held)
    assert found.curve[-1].result.good_share < 0.5


@pytest.mark.parametrize(
    ("prices", "best"), [((1.0, 2.0), "slow"), ((1.0, 1.4), "fast"), ((None, None), "fast")]
)
def test_the_cheapest_serves_or_the_fewest(
    prices: tuple[float | None, float | None], best: str
) -> None:
    slow, fast = candidate("slow", 1.0, prices[0]), candidate("fast", 0.6, prices[1])

    plan = planned(slow, fast, num_curve_requests=0)

    assert [found.num_replicas for found in plan.candidates] == [3, 2]
    assert plan.best is not None
    assert plan.best.candidate.name == best
    assert all(found.curve == () for found in plan.candidates)


def test_no_candidate_meets_the_target() -> None:
    plan = planned(candidate("slow"), max_replicas=2, num_curve_requests=0)

    assert plan.best is None
    assert plan.candidates[0].num_replicas is None
    assert plan.candidates[0].result.num_replicas == 2
    lines = plan_lines(plan)
    assert "no candidate meets the target with up to 2 replicas" in lines
    assert lines[-1].startswith("- 2 replicas missed the target in the simulation;")


@pytest.mark.parametrize(
    ("step_s", "start"),
    [
        (0.1, "- 1 replica met the target in the simulation;"),
        (1.0, "- 3 replicas met the target and 2 did not, both simulated;"),
    ],
)
def test_the_limits_name_the_numbers_that_were_simulated(step_s: float, start: str) -> None:
    plan = planned(candidate("some", step_s), num_curve_requests=0)

    assert plan_lines(plan)[-1].startswith(start)


def test_targets_that_an_idle_replica_misses_are_not_simulated(tmp_path: Path) -> None:
    tried: list[str] = []
    search = PlanSearch(max_replicas=8, num_curve_requests=30)
    candidates = [candidate("slow", 2.0), candidate("fast", 0.1)]
    both = make_plan(
        WINDOW, candidates, TARGET, search, on_tried=lambda what, _: tried.append(what)
    )
    none = planned(candidate("slow", 2.0))

    reason = (
        "impossible   slow: on an idle replica, p99 TTFT is at least 2.00 s (target: 1500 ms);"
        " p99 ITL is at least 2.00 s (target: 1500 ms)"
    )
    assert reason in plan_lines(both)
    assert both.best is both.candidates[0]
    assert tried
    assert all(what.startswith("fast") for what in tried)
    lines = plan_lines(none)
    assert reason in lines
    assert "no candidate meets the target with any number of replicas" in lines
    assert lines[-1].startswith("- Nothing was simulated")
    write_plan_report(none, tmp_path)
    assert plan_charts(none) == ()
    (found,) = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["impossible"]
    assert found["name"] == "slow"
    assert found["lower_bound"]["misses"] == ["p99 TTFT", "p99 ITL"]


def test_the_callback_receives_every_simulation() -> None:
    tried: list[tuple[str, bool]] = []
    running: set[str] = set()
    make_plan(
        WINDOW,
        [candidate("s")],
        TARGET,
        PlanSearch(max_replicas=2, num_curve_requests=0),
        lambda what, _: running.add(what),
        lambda what, result: tried.append((what, result.meets)),
    )

    assert tried == [("s, 2 replicas", False)]
    assert running == {"s, 2 replicas"}


def test_the_first_number_of_replicas_is_estimated_from_the_work() -> None:
    assert guessed_replicas(WINDOW, candidate("slow").replica) == 4
    assert guessed_replicas(WINDOW, candidate("idle", 0.0).replica) == 1


def test_a_report_is_served_and_states_what_is_not_in_it(tmp_path: Path) -> None:
    plan = planned(candidate("slow", 1.0, 2.5))

    write_plan_report(plan, tmp_path)

    document = json.loads(plan_json(plan))
    assert document["best"] == "slow"
    assert document["candidates"][0]["num_replicas"] == 3
    assert document["candidates"][0]["total_price"] == 7.5
    assert len(document["candidates"][0]["curve"]) == 7
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == plan_json(plan) + "\n"
    html = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "3 x slow behind round_robin at 7.5" in html
    assert "No failures are simulated" in html
    assert 'href="http' not in html
    assert [chart.name for chart in plan_charts(plan)] == [
        "ttft_replicas",
        "good_replicas",
        "goodput_load",
        "ttft_load",
    ]
