"""Quotas keep their guarantees for any traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import Failed
from penstock.scheduler.quotas import NO_QUOTA, QuotaAccounts, QuotaKind, TenantQuota
from penstock.scheduler.request import FailureReason, RequestSpec
from support.core import FakeClock, make_engine, make_spec, num_live_of, run_until_idle

MINUTE_S = 60.0
MARGIN = 1e-5
INDEX = 3

gaps_s = st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.floats(0.0, 200.0))
limits = st.integers(1, 200)


def admit_and_end(
    accounts: QuotaAccounts, key: int, prompt: int, now: float, tenant: str = "a"
) -> bool:
    if accounts.breach_of(tenant, prompt, 1, now) is not None:
        return False
    accounts.charge_request(make_spec(key, prompt, tenant=tenant, hashed=False), 1, INDEX, now)
    accounts.release(tenant)
    return True


@given(
    limit=limits,
    start_s=st.floats(0.0, 1e7),
    arrivals=st.lists(st.tuples(gaps_s, st.integers(1, 60)), max_size=200),
    is_tokens=st.booleans(),
)
def test_no_window_holds_more_than_its_share_and_a_burst(
    limit: int, start_s: float, arrivals: list[tuple[float, int]], is_tokens: bool
) -> None:
    quota = (
        TenantQuota(max_tokens_per_minute=limit)
        if is_tokens
        else TenantQuota(max_requests_per_minute=limit)
    )
    accounts = QuotaAccounts({"a": quota}, NO_QUOTA)
    now, used = start_s, list[tuple[float, int]]()
    for key, (gap_s, prompt) in enumerate(arrivals, start=1):
        now += gap_s
        # A separate test, below, covers requests above the limit of a minute.
        prompt = min(prompt, limit)
        if admit_and_end(accounts, key, prompt, now):
            used.append((now, prompt if is_tokens else 1))
    times = np.array([at_s for at_s, _ in used])
    sums = np.cumsum([0, *(count for _, count in used)])
    for first, since_s in enumerate(times):
        in_window = sums[first + 1 :] - sums[first]
        allowed = limit * (1.0 + (times[first:] - since_s) / MINUTE_S)
        assert (in_window <= allowed + limit * MARGIN).all()


@given(
    requests=st.none() | limits,
    tokens=st.none() | limits,
    steps=st.lists(
        st.tuples(gaps_s, st.sampled_from(["submit", "output", "refund"]), st.integers(1, 400)),
        max_size=60,
    ),
)
def test_the_accounts_equal_two_token_buckets(
    requests: int | None, tokens: int | None, steps: list[tuple[float, str, int]]
) -> None:
    quota = TenantQuota(max_requests_per_minute=requests, max_tokens_per_minute=tokens)
    accounts = QuotaAccounts({}, quota)
    most = {"requests": float(requests or 0), "tokens": float(tokens or 0)}
    level, now = dict(most), 0.0
    accounts.charge_request(make_spec(9999, 1, tenant="a", hashed=False), 1, INDEX, now)
    level["requests"] -= 1.0
    level["tokens"] -= 1.0
    charged = list[RequestSpec]()
    for key, (gap_s, what, count) in enumerate(steps, start=1):
        now += gap_s
        for name, full in most.items():
            level[name] = min(full, level[name] + gap_s * full / MINUTE_S)
        if what == "output":
            accounts.charge_outputs(np.full(count, INDEX, dtype=np.int32), now)
            level["tokens"] -= count
            continue
        if what == "refund":
            if charged:
                spec = charged.pop(count % len(charged))
                accounts.refund(spec)
                for name, num in (("requests", 1), ("tokens", spec.num_prompt_tokens)):
                    level[name] = min(most[name], level[name] + num)
            continue
        spare = min(
            (level["requests"] - 1.0) / most["requests"] if requests else 1.0,
            (level["tokens"] - min(count, most["tokens"])) / most["tokens"] if tokens else 1.0,
        )
        is_admitted = admit_and_end(accounts, key, count, now)
        if abs(spare) > MARGIN:
            assert is_admitted is (spare > 0.0)
        if is_admitted:
            level["requests"] -= 1.0
            level["tokens"] -= count
            charged.append(make_spec(key, count, tenant="a", hashed=False))


@given(
    requests=st.none() | limits,
    tokens=st.none() | limits,
    start_s=st.floats(0.0, 1e7),
    arrivals=st.lists(
        st.tuples(gaps_s, st.integers(1, 400), st.integers(0, 300)), min_size=1, max_size=60
    ),
)
def test_a_request_that_waits_its_retry_time_is_admitted(
    requests: int | None,
    tokens: int | None,
    start_s: float,
    arrivals: list[tuple[float, int, int]],
) -> None:
    quota = TenantQuota(max_requests_per_minute=requests, max_tokens_per_minute=tokens)
    accounts = QuotaAccounts({}, quota)
    now = start_s
    for key, (gap_s, prompt, num_outputs) in enumerate(arrivals, start=1):
        now += gap_s
        breach = accounts.breach_of("a", prompt, 1, now)
        if breach is not None:
            assert breach.retry_after_s is not None
            # The delay is not too long: shortly before its end, the request is still rejected.
            early_s = now + 0.99 * breach.retry_after_s
            if 0.01 * breach.retry_after_s > MARGIN:
                assert accounts.breach_of("a", prompt, 1, early_s) is not None
            now += breach.retry_after_s
        assert admit_and_end(accounts, key, prompt, now)
        accounts.charge_outputs(np.full(num_outputs, INDEX, dtype=np.int32), now)


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcdefgh"), gaps_s, st.integers(1, 400)), max_size=80
    )
)
def test_a_tenant_without_a_quota_is_never_rejected(
    arrivals: list[tuple[str, float, int]],
) -> None:
    tight = TenantQuota(max_num_live=1, max_requests_per_minute=1, max_tokens_per_minute=1)
    accounts = QuotaAccounts({"a": NO_QUOTA, "b": NO_QUOTA}, tight)
    now = 0.0
    for key, (tenant, gap_s, prompt) in enumerate(arrivals, start=1):
        now += gap_s
        is_admitted = admit_and_end(accounts, key, prompt, now, tenant)
        assert is_admitted or tenant not in "ab"
        assert accounts.faults({}) == []


@given(
    turns=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.sampled_from("abc"), st.integers(1, 12)),
            st.tuples(st.just("step"), st.just(""), st.integers(1, 3)),
            st.tuples(st.just("wait"), st.just(""), st.integers(1, 40)),
            st.tuples(st.just("limit"), st.sampled_from("abc"), st.integers(1, 50)),
        ),
        max_size=60,
    ),
    depth=st.sampled_from([1, 2]),
)
def test_limits_that_change_under_load_keep_the_accounts_right(
    turns: list[tuple[str, str, int]], depth: int
) -> None:
    """The numbers of live requests in the quota accounts match the engine's after every turn."""
    config = SchedulerConfig(
        max_num_batched_tokens=16, tenant_quota=TenantQuota(max_num_live=2, max_tokens_per_minute=9)
    )
    clock = FakeClock()
    engine, _ = make_engine(config=config, clock=clock, max_num_seqs=3, pipeline_depth=depth)
    quotas = dict[str, TenantQuota]()
    for key, (what, tenant, count) in enumerate(turns, start=1):
        if what == "submit":
            engine.submit((make_spec(key, count, tenant=tenant),))
        elif what == "step":
            for _ in range(count):
                engine.step()
        elif what == "wait":
            clock.now_s += count
        else:
            quotas[tenant] = TenantQuota(max_num_live=count, max_tokens_per_minute=count)
            engine.set_quotas(quotas, NO_QUOTA if count % 2 else config.tenant_quota)
            engine.set_weights({tenant: float(count)})
        engine.check_integrity()
    run_until_idle(engine)
    engine.check_integrity()
    accounts = engine.quotas
    assert [num_live_of(accounts, tenant) for tenant in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("most", [1, 3])
def test_live_requests_of_a_tenant_never_exceed_its_limit(most: int) -> None:
    engine, _ = make_engine(max_num_seqs=8, tenant_quota=TenantQuota(max_num_live=most))
    for key in range(1, 9):
        engine.submit((make_spec(key, 3, tenant="a"),))
    engine.submit((make_spec(9, 3, tenant="b"),))
    ends = engine.step().ends
    rejected = [end for end in ends if isinstance(end, Failed)]
    assert [end.key for end in rejected] == list(range(most + 1, 9))
    for end in rejected:
        assert end.reason is FailureReason.TENANT_OVER_QUOTA
        assert end.breach is not None
        assert (end.breach.kind, end.breach.limit) == (QuotaKind.NUM_LIVE, most)
    run_until_idle(engine)
    engine.submit((make_spec(20, 3, tenant="a"),))
    assert engine.step().ends == ()
