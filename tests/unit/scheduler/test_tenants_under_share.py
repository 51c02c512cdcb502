"""Which tenants are under their share, which waiting requests of others they may overtake, and
which running requests are preempted for them.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Preempted
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.request import NO_TIME, FinishReason
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.victims import MAX_TENANT_PREEMPTIONS, Shortage
from support.core import (
    FakeClock,
    NullExecutor,
    changed,
    ends,
    make_engine,
    make_spec,
    run_until_idle,
    victims_of,
)


def build(**options: Any) -> tuple[Engine, NullExecutor]:
    return make_engine(**{"max_num_seqs": 4, "watermark": 0.0, "yield_ratio": 2.0, **options})


def submit(engine: Engine, tenant: str, keys: Sequence[int], **options: Any) -> None:
    for key in keys:
        engine.submit((make_spec(key, tenant=tenant, **options),))


def shares_of(engine: Engine, ratio: float = 2.0) -> FairShare:
    return FairShare(engine.arrays, engine.cache, engine.running, engine.tenants, ratio)


def flooded(num_running: int = 4, **options: Any) -> tuple[Engine, NullExecutor]:
    """Return an engine and its executor. One tenant has all slots and all requests in the queue."""
    engine, executor = build(max_num_seqs=num_running, **options)
    submit(engine, "flood", range(1, 2 * num_running + 1), prompt=3, max_tokens=12)
    engine.step()
    assert len(engine.running) == num_running
    return engine, executor


@pytest.mark.parametrize("depth", [1, 2])
def test_a_flood_gives_a_slot_to_a_tenant_under_its_share_and_loses_only_time(depth: int) -> None:
    engine, _ = flooded(pipeline_depth=depth)
    submit(engine, "quiet", [11], prompt=3, max_tokens=2)
    reported = [engine.step(), engine.step(), engine.step()]
    assert changed(reported, Admitted) == [11]
    assert len(changed(reported, Preempted)) == 1
    finished = ends([*reported, *run_until_idle(engine)])
    assert len(finished) == 9
    assert all(
        isinstance(end, Completed) and end.reason is FinishReason.LENGTH
        for end in finished.values()
    )


def test_blocks_come_from_the_request_that_loses_least_and_frees_enough() -> None:
    engine, _ = build(num_blocks=20, max_num_batched_tokens=64)
    submit(engine, "flood", [1], prompt=24, max_tokens=8)
    submit(engine, "flood", [2], prompt=12, max_tokens=8)
    submit(engine, "flood", [3], prompt=28, max_tokens=8)
    engine.step()
    submit(engine, "quiet", [11], prompt=16, max_tokens=1)
    reported = engine.step()
    assert changed([reported], Preempted) == [2], "its 3 blocks and the 1 that was free"
    assert changed([reported], Admitted) == [11]


def test_no_request_is_preempted_when_it_would_not_suffice() -> None:
    engine, _ = build(num_blocks=20, max_num_batched_tokens=64)
    submit(engine, "flood", [1, 2], prompt=28, max_tokens=8)
    submit(engine, "flood", [3], prompt=12, max_tokens=8, priority=1)
    engine.step()
    shares = shares_of(engine)
    before = shares.dominant.copy()
    lack = Shortage(tenant=5, level=0, is_slot=False, num_blocks_short=15, num_blocks=3)
    assert victims_of(engine).choose_for_tenant(shares, lack, set()) == []
    assert (shares.dominant == before).all()


@pytest.mark.parametrize(
    "options",
    [{"yield_ratio": NO_TIME}, {"admission_policy": AdmissionPolicy.GUARANTEED_NO_EVICT}],
)
def test_a_running_request_keeps_its_slot_where_that_is_asked_for(options: dict[str, Any]) -> None:
    engine, _ = flooded(**options)
    submit(engine, "quiet", [11], prompt=3, max_tokens=2)
    reported = run_until_idle(engine)
    assert not changed(reported, Preempted)


def test_tenants_with_equal_shares_do_not_preempt_each_other() -> None:
    engine, _ = build()
    for first in (1, 2):
        for tenant, base in (("a", 0), ("b", 20)):
            submit(engine, tenant, [base + first], prompt=3, max_tokens=12)
    engine.step()
    submit(engine, "a", range(5, 15), prompt=3, max_tokens=2)
    submit(engine, "b", range(25, 35), prompt=3, max_tokens=2)
    assert not changed(run_until_idle(engine), Preempted)


def test_no_request_is_preempted_for_one_of_a_lower_class() -> None:
    engine, _ = build()
    submit(engine, "flood", range(1, 9), prompt=3, max_tokens=12, priority=1)
    engine.step()
    submit(engine, "quiet", [11], prompt=3, max_tokens=2)
    reported = run_until_idle(engine)
    assert not changed(reported, Preempted)


def test_a_request_is_preempted_for_tenants_a_limited_number_of_times() -> None:
    engine, _ = flooded(2)
    key, counts = 100, dict.fromkeys(range(1, 5), 0)
    for _ in range(60):
        if not engine.tenants.num_waiting_of("quiet"):
            key += 1
            submit(engine, "quiet", [key], prompt=3, max_tokens=1)
        for preempted in changed([engine.step()], Preempted):
            counts[preempted] += 1
    assert max(counts.values()) == MAX_TENANT_PREEMPTIONS
    run_until_idle(engine)


def test_the_prompt_of_a_tenant_under_its_share_precedes_one_in_prefill() -> None:
    engine, executor = build(max_num_seqs=8)
    submit(engine, "flood", range(1, 4), prompt=60, max_tokens=1)
    engine.step()
    submit(engine, "quiet", [11], prompt=9, max_tokens=1)
    reported = engine.step()
    assert executor.batches[-1].num_tokens.tolist() == [9], "and nothing that delays it"
    assert reported.keys.tolist() == [11]
    submit(engine, "quiet", [12], prompt=9, max_tokens=1)
    engine.step()
    assert int(executor.batches[-1].num_tokens.sum()) == 16, "not twice running"


def test_prompts_under_way_are_not_starved_by_tenants_under_their_share() -> None:
    stride = 3
    engine, executor = build(max_num_seqs=8, num_blocks=128, aging_stride=stride)
    submit(engine, "flood", range(1, 4), prompt=60, max_tokens=1)
    engine.step()
    flood = {request.slot for request in engine.running}
    served: list[bool] = []
    for key in range(100, 160):
        submit(engine, "quiet", [key], prompt=15, max_tokens=1)
        engine.step()
        served.append(bool(flood & set(executor.batches[-1].slots.tolist())))
        if len(engine.running) < 3:
            break
    assert all(any(served[at : at + stride]) for at in range(len(served) - stride))
    assert not all(served)


def test_a_tenant_under_its_share_is_not_preempted_while_others_can_be() -> None:
    engine, _ = build(max_num_batched_tokens=64)
    submit(engine, "flood", [1, 2, 3], prompt=9)
    submit(engine, "quiet", [11], prompt=2, max_tokens=30)
    engine.step()
    engine.tenants.charge_prompt(engine.requests[11].tenant, 10_000)
    assert victims_of(engine).choose_victim(set(), shares_of(engine)).spec.tenant == "flood"
    assert victims_of(engine).choose_victim(set()).spec.tenant == "quiet"


def test_weights_count_in_a_tenants_share() -> None:
    for weight, is_under_share in ((1.0, False), (4.0, True)):
        engine, _ = build(tenant_weights={"gold": weight})
        submit(engine, "plain", [1, 2], prompt=3, max_tokens=9)
        submit(engine, "gold", [3], prompt=3, max_tokens=9)
        engine.step()
        shares = shares_of(engine)
        assert shares.is_under_share(engine.requests[3].tenant, num_slots=1) is is_under_share
        assert not shares.is_under_share(engine.requests[1].tenant)


def test_a_request_admitted_without_its_age_keeps_its_class() -> None:
    engine, _ = build(aging_s=1.0)
    submit(engine, "flood", [1], arrival_s=-100.0)
    engine.step()
    assert engine.arrays.level[engine.requests[1].slot] == 0


def test_a_returning_tenant_has_a_burst_of_service_and_a_new_one_has_none() -> None:
    tenants = TenantCounters(SchedulerConfig(tenant_burst_tokens=100.0))
    flood, quiet = tenants.join("flood"), tenants.join("quiet")
    tenants.leave(quiet)
    tenants.charge_prompt(flood, 70)
    assert tenants.service[tenants.join("quiet")] == 0
    tenants.leave(quiet)
    tenants.charge_prompt(flood, 1000)
    assert tenants.service[tenants.join("quiet")] == 970
    tenants.leave(quiet)
    assert tenants.service[tenants.join("new")] == 1070


def test_a_tenant_of_few_large_requests_gets_its_second_one() -> None:
    engine, _ = make_engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=256)
    submit(engine, "quiet", [11], prompt=24, max_tokens=8)
    engine.step()
    submit(engine, "flood", range(1, 9), prompt=28, max_tokens=8)
    engine.step()
    submit(engine, "quiet", [12], prompt=24, max_tokens=8)
    reported = engine.step()
    # With 12 of 40 blocks it holds less than half of the flood's 28.
    assert changed([reported], Admitted) == [12]
    assert len(changed([reported], Preempted)) == 1


@pytest.mark.parametrize(("crowd", "is_under_share"), [(("a",), True), (("a", "b"), False)])
def test_where_no_tenant_holds_most_a_tenant_under_its_share_holds_less(
    crowd: tuple[str, ...], is_under_share: bool
) -> None:
    engine, _ = build(max_num_seqs=32, max_num_batched_tokens=256)
    for key, tenant in enumerate((*crowd, "quiet"), 1):
        submit(engine, tenant, [key], prompt=9 if tenant == "quiet" else 28, max_tokens=8)
    engine.step()
    index = engine.tenants.index_of("quiet")
    assert index is not None
    # 3 blocks next to 7 of each other one.
    assert shares_of(engine).is_under_share(index) is is_under_share


# Requests that light tenants do not pass: a higher class in progress, and aged requests.

BUDGET = 16
HIGH, LOW = 1, 0


def ordered(clock: FakeClock | None = None, **options: Any) -> tuple[Engine, NullExecutor]:
    return build(
        clock=clock,
        **{"num_blocks": 256, "max_num_seqs": 8, "max_prefill_share": 1.0, **options},
    )


def prefilled(engine: Engine, executor: NullExecutor) -> dict[int, int]:
    """Return how many prompt tokens the last step computed, by request key."""
    batch, running = executor.batches[-1], engine.running
    found: dict[int, int] = {}
    rows = zip(batch.slots.tolist(), batch.num_tokens.tolist(), strict=True)
    for slot, count in list(rows)[batch.num_decodes :]:
        request = running.request_at(slot)
        assert request is not None
        found[request.spec.key] = count
    return found


def heavy(engine: Engine) -> None:
    """Run three decodes of one tenant, so that a tenant with one request is under its share."""
    submit(engine, "flood", [1, 2, 3], prompt=3, max_tokens=50)
    engine.step()


@pytest.mark.parametrize("priority", [HIGH, LOW])
def test_a_new_light_prompt_does_not_precede_a_higher_class_in_prefill(priority: int) -> None:
    engine, executor = ordered()
    heavy(engine)
    submit(engine, "flood", [4], prompt=60, max_tokens=2, priority=priority)
    engine.step()
    submit(engine, "quiet", [11], prompt=20, max_tokens=2)
    engine.step()
    assert list(prefilled(engine, executor)) == ([4] if priority == HIGH else [11])


@pytest.mark.parametrize("priority", [HIGH, LOW])
def test_a_light_prompt_in_prefill_does_not_precede_a_higher_class_in_prefill(
    priority: int,
) -> None:
    engine, executor = ordered(max_prefill_share=0.5)
    heavy(engine)
    submit(engine, "flood", [4], prompt=60, max_tokens=2, priority=HIGH)
    submit(engine, "quiet", [11], prompt=60, max_tokens=2, priority=priority)
    engine.step()
    assert list(prefilled(engine, executor)) == [4, 11], "neither was under way"
    engine.step()
    assert next(iter(prefilled(engine, executor))) == (4 if priority == LOW else 11)


def test_light_requests_precede_a_turn_by_age_a_limited_number_of_times() -> None:
    stride, clock = 3, FakeClock()
    engine, _ = ordered(clock, aging_s=10.0, aging_stride=stride, tenant_burst_tokens=1e6)
    # Known from before, so that they are the first in turn when they come back.
    submit(engine, "quiet", [11], prompt=1, max_tokens=1)
    engine.step()
    submit(engine, "flood", range(1, 7), prompt=3, max_tokens=50)
    engine.step()
    assert len(engine.running) == 6
    clock.now_s = 1.0
    submit(engine, "flood", [7], prompt=60, max_tokens=2, arrival_s=-20.0)
    submit(engine, "quiet", range(20, 40), prompt=1, max_tokens=1, arrival_s=1.0)
    order: list[int] = []
    while 7 not in order:
        order.extend(changed([engine.step()], Admitted))
    assert 0 < order.index(7) <= 2 * stride
