"""Quotas in an engine: what is charged, when it is charged, and what a change of limits does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.scheduler.config import SchedulingOrder
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.quotas import (
    MAX_QUOTA,
    NO_QUOTA,
    QuotaAccounts,
    QuotaBreach,
    QuotaKind,
    TenantQuota,
)
from penstock.scheduler.request import FailureReason, RequestSpec
from support.core import FakeClock, make_engine, make_spec, num_live_of, run_until_idle

FIELDS = ("max_num_live", "max_requests_per_minute", "max_tokens_per_minute")


def engine_with(
    quota: TenantQuota, order: SchedulingOrder = SchedulingOrder.FAIR
) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    engine, _ = make_engine(clock=clock, max_num_batched_tokens=64, tenant_quota=quota, order=order)
    return engine, clock


def rejection(engine: Engine, spec: RequestSpec) -> Failed | None:
    engine.submit((spec,))
    ends = [end for events in run_until_idle(engine) for end in events.ends]
    rejected = [end for end in ends if isinstance(end, Failed)]
    return rejected[0] if rejected else None


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("limit", [0, -1, MAX_QUOTA + 1, 1.5, True, "6"])
def test_an_invalid_limit_is_rejected_by_name(name: str, limit: object) -> None:
    given: dict[str, object] = {name: limit}
    with pytest.raises(ValueError, match=name):
        TenantQuota(**given)  # type: ignore[arg-type]  # what is rejected is the point


@pytest.mark.parametrize("order", list(SchedulingOrder))
def test_prompts_and_outputs_are_charged_in_any_order(order: SchedulingOrder) -> None:
    engine, clock = engine_with(TenantQuota(max_tokens_per_minute=60), order)
    assert rejection(engine, make_spec(1, 20, max_tokens=30)) is None
    # 50 of 60 are used: 10 fit, 11 do not, and a second brings one.
    rejected = rejection(engine, make_spec(2, 11, max_tokens=1))
    assert rejected is not None
    assert rejected.reason is FailureReason.TENANT_OVER_QUOTA
    assert rejected.breach == QuotaBreach(
        kind=QuotaKind.TOKENS_PER_MINUTE, limit=60, retry_after_s=rejected.retry_after_s
    )
    assert rejected.retry_after_s == pytest.approx(1.0)
    clock.now_s += 1.0
    assert rejection(engine, make_spec(3, 11, max_tokens=1)) is None


def test_output_may_overdraw_the_quota_and_delays_the_next_request() -> None:
    engine, clock = engine_with(TenantQuota(max_tokens_per_minute=10))
    assert rejection(engine, make_spec(1, 5, max_tokens=25)) is None
    rejected = rejection(engine, make_spec(2, 1, max_tokens=1))
    assert rejected is not None
    assert rejected.retry_after_s == pytest.approx(21 * 6.0), "20 of debt, and one to spend"
    clock.now_s += 21 * 6.0
    assert rejection(engine, make_spec(3, 1, max_tokens=1)) is None


def test_a_prompt_of_more_than_a_minute_waits_for_a_whole_one() -> None:
    engine, clock = engine_with(TenantQuota(max_tokens_per_minute=10))
    assert rejection(engine, make_spec(1, 30, max_tokens=1)) is None
    clock.now_s += 60.0
    assert rejection(engine, make_spec(2, 30, max_tokens=1)) is not None
    clock.now_s += 2 * 60.0 + 6.0
    assert rejection(engine, make_spec(3, 30, max_tokens=1)) is None


def test_a_replay_is_admitted_and_costs_nothing_again() -> None:
    engine, _ = engine_with(TenantQuota(max_num_live=1, max_requests_per_minute=1))
    engine.submit((make_spec(1, 3, max_tokens=9),))
    engine.submit((replace(make_spec(2, 3, max_tokens=9), num_replays=1),))
    assert engine.step().ends == ()
    assert num_live_of(engine.quotas, "") == 2
    engine.check_integrity()
    run_until_idle(engine)
    accounts = engine.quotas
    breach = accounts.breach_of("", 1, 1, 0.0)
    assert breach is not None
    assert breach.retry_after_s == pytest.approx(60.0), "one request is on the account, not two"


def test_each_output_of_a_request_counts() -> None:
    engine, clock = engine_with(TenantQuota(max_num_live=2, max_requests_per_minute=2))
    outputs = [make_spec(1, 4, request_id="r")]
    for key in (2, 3):
        other = make_spec(key, outputs[0].prompt_ids.tolist(), request_id="r", leader_key=1)
        outputs.append(replace(other, output_index=key - 1))

    engine.submit(tuple(outputs))
    ends = [end for events in run_until_idle(engine) for end in events.ends]
    assert len(ends) == 3, "three outputs, of two that are allowed"
    for end in ends:
        assert isinstance(end, Failed)
        assert end.reason is FailureReason.TOO_MANY_OUTPUTS
        assert end.retry_after_s == math.inf
        assert end.breach == QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=2, retry_after_s=math.inf)

    engine.submit(tuple(outputs[:2]))
    assert num_live_of(engine.quotas, "") == 2
    run_until_idle(engine)
    assert num_live_of(engine.quotas, "") == 0
    rejected = rejection(engine, make_spec(4, 4))
    assert rejected is not None, "two outputs were the requests of this minute"
    clock.now_s += 30.0
    assert rejection(engine, make_spec(5, 4)) is None


def test_two_outputs_are_rejected_if_one_more_request_may_be_live() -> None:
    engine, _ = engine_with(TenantQuota(max_num_live=2))
    engine.submit((make_spec(1, 4),))
    leader = make_spec(2, 4, request_id="r")
    other = make_spec(3, leader.prompt_ids.tolist(), request_id="r", leader_key=2)

    engine.submit((leader, replace(other, output_index=1)))

    ends = [end for events in run_until_idle(engine) for end in events.ends]
    ends = [end for end in ends if isinstance(end, Failed)]
    assert [(end.key, end.reason) for end in ends] == [
        (2, FailureReason.TENANT_OVER_QUOTA),
        (3, FailureReason.TENANT_OVER_QUOTA),
    ]


def test_a_request_rejected_for_another_reason_is_not_charged() -> None:
    engine, _ = engine_with(TenantQuota(max_requests_per_minute=1))
    too_long = rejection(engine, make_spec(1, 60, max_tokens=60))
    assert too_long is not None
    assert too_long.reason is FailureReason.PROMPT_TOO_LONG
    assert rejection(engine, make_spec(2, 3)) is None


def outputs_of(tenant: str, keys: range, num_prompt: int) -> tuple[RequestSpec, ...]:
    leader = make_spec(keys[0], num_prompt, request_id=f"r{keys[0]}", tenant=tenant)
    others = [
        replace(leader, key=key, leader_key=leader.key, output_index=key - leader.key)
        for key in keys[1:]
    ]
    return leader, *others


@pytest.mark.parametrize(
    "quota", [TenantQuota(max_requests_per_minute=3), TenantQuota(max_tokens_per_minute=30)]
)
def test_a_displaced_request_costs_nothing(quota: TenantQuota) -> None:
    engine, _ = make_engine(max_num_waiting=3, max_num_seqs=1)
    engine.set_quotas({"a": quota}, NO_QUOTA)
    for key in (1, 2, 3):
        engine.submit((make_spec(key, 10, tenant="a"),))
    engine.submit((make_spec(4, 5, tenant="b"),))
    ends = engine.events.take(0, 0.0).ends
    assert [end.key for end in ends] == [3]
    assert ends[0].wait is not None, "by which a front knows that it was queued"

    accounts = engine.quotas
    assert accounts.breach_of("a", 10, 1, 0.0) is None, "of its three it may send one again"
    breach = accounts.breach_of("a", 20, 2, 0.0)
    assert breach is not None
    assert breach.retry_after_s == pytest.approx(20.0), "the two that wait are paid for"


def test_all_outputs_of_a_displaced_request_are_refunded_and_its_prompt_once() -> None:
    engine, _ = make_engine(max_num_waiting=6, max_num_seqs=1)
    engine.set_quotas(
        {"a": TenantQuota(max_requests_per_minute=6, max_tokens_per_minute=60)}, NO_QUOTA
    )
    accounts = engine.quotas
    engine.submit(outputs_of("a", range(1, 3), 5))
    engine.submit(outputs_of("a", range(3, 7), 20))
    engine.submit((make_spec(7, 5, tenant="b"),))
    assert sorted(end.key for end in engine.events.take(0, 0.0).ends) == [3, 4, 5, 6]

    assert accounts.breach_of("a", 55, 4, 0.0) is None
    for num_tokens, num_outputs in ((56, 1), (1, 5)):
        assert accounts.breach_of("a", num_tokens, num_outputs, 0.0) is not None


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_request_cancelled_in_the_queue_is_charged(is_cancelled: bool) -> None:
    engine, clock = engine_with(TenantQuota(max_requests_per_minute=1))
    engine.submit((make_spec(1, 3, time_limit_s=5.0),))
    if is_cancelled:
        assert engine.cancel(1)
    else:
        clock.now_s += 5.0
    engine.step()
    assert not engine.requests
    assert rejection(engine, make_spec(2, 3)) is not None


def test_of_two_limits_the_longer_wait_is_reported() -> None:
    quota = TenantQuota(max_requests_per_minute=2, max_tokens_per_minute=60)
    accounts = QuotaAccounts({}, quota)
    for key in (1, 2):
        accounts.charge_request(make_spec(key, 30), 1, 0, 0.0)
    breach = accounts.breach_of("", 1, 1, 0.0)
    assert breach is not None
    assert (breach.kind, breach.limit) == (QuotaKind.REQUESTS_PER_MINUTE, 2)
    assert breach.retry_after_s == pytest.approx(30.0)


def test_a_smaller_limit_creates_no_debt_and_a_removed_one_applies_at_once() -> None:
    accounts = QuotaAccounts({}, TenantQuota(max_tokens_per_minute=1000))
    accounts.charge_request(make_spec(1, 500, tenant="a"), 1, 0, 0.0)
    accounts.release("a")
    accounts.set_quotas({"a": TenantQuota(max_tokens_per_minute=10)}, NO_QUOTA)
    assert accounts.breach_of("a", 5, 1, 0.0) is None, "half of a minute is left, of any size"
    breach = accounts.breach_of("a", 6, 1, 0.0)
    assert breach is not None
    assert breach.retry_after_s == pytest.approx(6.0)
    accounts.set_quotas({}, NO_QUOTA)
    assert accounts.breach_of("a", 10**6, 1, 0.0) is None


def test_empty_accounts_are_forgotten() -> None:
    accounts = QuotaAccounts({}, TenantQuota(max_requests_per_minute=1))
    for key in range(1, 1001):
        now = 100.0 * key
        accounts.charge_request(make_spec(key, 1, tenant=f"tenant-{key}"), 1, key % 7, now)
        accounts.release(f"tenant-{key}")
    assert len(accounts) <= 3


def test_weights_change_for_requests_that_wait_already() -> None:
    engine, _ = engine_with(NO_QUOTA)
    for key in range(1, 40):
        engine.submit((make_spec(key, 4, tenant="ab"[key % 2]),))
    engine.step()
    engine.set_weights({"a": 4.0}, 2.0)
    tenants = engine.tenants
    index = {found.spec.tenant: found.tenant for found in engine.queue}
    assert (tenants.weight[index["a"]], tenants.weight[index["b"]]) == (4.0, 2.0)
    with pytest.raises(ValueError, match="tenant_weights"):
        engine.set_weights({"a": 0.0})
    run_until_idle(engine)
