"""The fair order of requests by tenant service, deadline and age, and which requests may overtake
others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.scheduler import tenant_counters
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Failed, Preempted
from penstock.scheduler.quotas import QuotaBreach, QuotaKind
from penstock.scheduler.request import FailureReason
from support.core import (
    FakeClock,
    changed,
    ends,
    make_engine,
    make_spec,
    run_until_idle,
    service_of,
    victims_of,
)


def submit_all(engine: Engine, tenant: str, keys: Sequence[int], **options: object) -> None:
    for key in keys:
        engine.submit((make_spec(key, tenant=tenant, **options),))  # type: ignore[arg-type]


def one_slot(**options: Any) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    return make_engine(clock=clock, max_num_seqs=1, **options)[0], clock


def test_tenants_take_turns_regardless_of_the_length_of_their_queues() -> None:
    engine, _ = one_slot()
    submit_all(engine, "flood", range(1, 7))
    submit_all(engine, "quiet", [7, 8])
    assert changed(run_until_idle(engine), Admitted) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_a_tenant_of_double_weight_is_admitted_twice_as_often() -> None:
    engine, _ = one_slot(tenant_weights={"gold": 2.0})
    submit_all(engine, "plain", range(1, 5))
    submit_all(engine, "gold", range(11, 19))
    order = changed(run_until_idle(engine), Admitted)
    assert sum(key > 10 for key in order[:6]) == 4


def test_output_weighs_more_than_prompt_and_a_cached_prefix_nothing() -> None:
    engine, _ = one_slot()
    service = functools.partial(service_of, engine.tenants)
    submit_all(engine, "a", [1], prompt=list(range(9)), max_tokens=3)
    run_until_idle(engine)
    assert service("a") == 9 + 2 * 3
    submit_all(engine, "b", [2], prompt=list(range(9)), max_tokens=1)
    run_until_idle(engine)
    assert service("b") - service("a") == pytest.approx(1 + 2), "lifted to a, then 8 of 9 cached"


def test_no_tenant_saves_up_service_while_away() -> None:
    engine, _ = one_slot()
    submit_all(engine, "busy", range(1, 9))
    for _ in range(20):
        engine.step()
    submit_all(engine, "idle", range(11, 15))
    order = changed(run_until_idle(engine), Admitted)
    late = order[order.index(11) :]
    assert late[:6] in ([11, 6, 12, 7, 13, 8], [11, 7, 12, 8, 13, 14], [11, 12, 6, 13, 7, 14]), late


def test_the_earliest_deadline_is_first_only_within_a_tenant() -> None:
    engine, _ = one_slot()
    submit_all(engine, "a", [1, 2], deadline_s=900.0)
    submit_all(engine, "a", [3], deadline_s=10.0)
    submit_all(engine, "b", [4], ttft_deadline_s=2.0)
    assert changed(run_until_idle(engine), Admitted) == [3, 4, 1, 2]


def test_a_missing_deadline_counts_as_arrival_plus_aging() -> None:
    engine, clock = one_slot(aging_s=5.0)
    submit_all(engine, "a", [1], arrival_s=0.0)
    clock.now_s = 1.0
    submit_all(engine, "a", [2], arrival_s=1.0, deadline_s=4.9)
    submit_all(engine, "a", [3], arrival_s=1.0, deadline_s=5.1)
    assert changed(run_until_idle(engine), Admitted) == [2, 1, 3]


def test_age_precedes_higher_classes_in_a_limited_number_of_turns() -> None:
    engine, clock = one_slot(aging_s=10.0, aging_stride=3)
    submit_all(engine, "low", [1], arrival_s=0.0)
    clock.now_s = 10.0
    submit_all(engine, "high", range(11, 16), arrival_s=10.0, priority=1)
    clock.now_s = 19.9
    submit_all(engine, "high", range(16, 19), arrival_s=19.9, priority=1)
    clock.now_s = 20.0
    assert changed(run_until_idle(engine), Admitted)[:3] == [11, 12, 1]


def test_a_preempted_request_precedes_new_ones_of_its_tenant() -> None:
    clock = FakeClock()
    engine, _ = make_engine(clock=clock, num_blocks=6, max_num_seqs=2, watermark=0.0)
    submit_all(engine, "a", [1, 2], prompt=3, max_tokens=18)
    reported = [engine.step()]
    submit_all(engine, "a", [3], prompt=3, max_tokens=2, deadline_s=1.0)
    reported += run_until_idle(engine)
    preempted = changed(reported, Preempted)
    order = changed(reported, Admitted)
    assert preempted
    back = [index for index, key in enumerate(order) if key == preempted[0]][1]
    assert order.index(3) > back


def test_a_limited_number_of_small_requests_pass_a_huge_one() -> None:
    engine, _ = make_engine(
        num_blocks=16,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        watermark=0.0,
        max_num_overtakes=3,
        max_overtake_s=1e9,
    )
    submit_all(engine, "a", [1], prompt=20, max_tokens=20)
    engine.step()
    submit_all(engine, "a", [2], prompt=60, max_tokens=1)
    submit_all(engine, "a", range(3, 12), prompt=3, max_tokens=1)
    order = changed(run_until_idle(engine), Admitted)
    assert order == [3, 4, 5, 2, 6, 7, 8, 9, 10, 11]


def test_no_request_passes_a_huge_one_after_max_overtake_s() -> None:
    clock = FakeClock()
    engine, _ = make_engine(
        clock=clock,
        num_blocks=16,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        watermark=0.0,
        max_overtake_s=2.0,
    )
    submit_all(engine, "a", [1], prompt=20, max_tokens=20)
    engine.step()
    submit_all(engine, "a", [2], prompt=60, max_tokens=1)
    submit_all(engine, "a", [3], prompt=3, max_tokens=1, arrival_s=1.0)
    assert changed([engine.step()], Admitted) == [3]
    clock.now_s = 2.1
    submit_all(engine, "a", [4], prompt=3, max_tokens=1, arrival_s=2.1)
    reported = run_until_idle(engine)
    assert changed(reported, Admitted) == [2, 4]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine, executor = make_engine()
    submit_all(engine, "a", [1], prompt=60, max_tokens=1)
    submit_all(engine, "a", [2], prompt=7, max_tokens=1)
    reported = engine.step()
    assert [r.spec.key for r in executor.batches[0].admitted] == [1, 2]
    assert executor.batches[0].num_tokens.tolist() == [9, 7], "what nobody wanted goes back"
    assert reported.keys.tolist() == [2]


def test_limits_of_one_tenant() -> None:
    engine, executor = make_engine(max_num_waiting_per_tenant=3, max_num_running_per_tenant=1)
    submit_all(engine, "a", range(1, 5))
    submit_all(engine, "b", [5])
    reported = run_until_idle(engine)
    breach = QuotaBreach(kind=QuotaKind.NUM_WAITING, limit=3)
    assert ends(reported)[4] == Failed(
        key=4, at_s=0.0, reason=FailureReason.TENANT_OVER_QUOTA, breach=breach
    )
    assert [r.spec.key for r in executor.batches[0].admitted] == [1, 5]
    assert changed(reported, Admitted) == [1, 5, 2, 3]


def test_the_victim_is_of_the_lowest_class_then_the_greediest_then_the_cheapest() -> None:
    clock = FakeClock()
    engine, _ = make_engine(clock=clock, max_num_batched_tokens=64, aging_s=10.0)
    submit_all(engine, "a", [1], prompt=9, priority=1)
    submit_all(engine, "a", [2], prompt=9)
    submit_all(engine, "a", [3], prompt=6)
    submit_all(engine, "b", [4], prompt=8)
    engine.step()
    victims: list[int] = []
    spared: set[int] = set()
    for _ in range(4):
        victim = victims_of(engine).choose_victim(spared)
        spared.add(victim.slot)
        victims.append(victim.spec.key)
    assert victims == [3, 2, 4, 1]
    with pytest.raises(ValueError, match="no request"):
        victims_of(engine).choose_victim(spared)


def test_counters_start_again_before_they_lose_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, largest = [], [0.0]
    for rebase_at in (2.0**40, 50.0):
        monkeypatch.setattr(tenant_counters, "REBASE_AT", rebase_at)
        engine, _ = one_slot(tenant_burst_tokens=0.0)
        submit_all(engine, "a", range(1, 20))
        submit_all(engine, "b", range(21, 40), prompt=9)
        submit_all(engine, "c", range(41, 50), prompt=2)
        orders.append(changed(run_until_idle(engine), Admitted))
        largest.append(float(engine.tenants.service.max()))
    assert orders[0] == orders[1]
    assert largest[2] < 150 < largest[1]


def test_idle_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_counters, "MAX_IDLE_TENANTS", 3)
    engine, _ = one_slot()
    for key in range(1, 30):
        submit_all(engine, f"tenant {key}", [key], prompt=2, max_tokens=1)
        run_until_idle(engine)
    assert len(engine.tenants) == 3
    assert len(engine.tenants.num_waiting) == 4
