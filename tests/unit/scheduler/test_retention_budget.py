"""Limits of retention above the default priority: the number of blocks, in total and per tenant,
and the duration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import Admitted
from penstock.scheduler.request import CacheRetention
from penstock.scheduler.retention import BlockClaims, EngineRetention, RetentionBudget
from support.core import FakeClock, make_engine, make_info, make_spec

HIGH = CacheRetention(level=100)
BUDGET = RetentionBudget(max_num_blocks=6, max_num_of_tenant=4, max_duration_s=10.0)


@pytest.fixture
def claims() -> BlockClaims:
    return BlockClaims(BUDGET)


def claimed(claims: BlockClaims, blocks: Sequence[int]) -> list[int]:
    return [block for block in blocks if claims.level(block) == 100]


def faults(claims: BlockClaims) -> list[str]:
    return [fault for fault in claims.faults() if fault]


def test_a_tenant_over_its_budget_loses_its_oldest_claims(claims: BlockClaims) -> None:
    assert claims.make([1, 2, 3], HIGH, "a", 0.0) == []
    assert claims.make([4, 5], HIGH, "a", 1.0) == [1]

    assert claimed(claims, range(1, 6)) == [2, 3, 4, 5]
    assert claims.cuts.num_dropped_blocks == 1
    assert faults(claims) == []


def test_over_the_budget_of_all_the_tenant_with_most_claims_loses_one(claims: BlockClaims) -> None:
    claims.make([1, 2, 3, 4], HIGH, "a", 0.0)
    claims.make([5, 6], HIGH, "b", 0.0)

    assert claims.make([7], HIGH, "b", 1.0) == [1]
    # Now three each: a tenant does not take from an equal.
    assert claims.make([8], HIGH, "b", 2.0) == [5]
    assert faults(claims) == []


def test_a_claim_ends_with_the_longest_duration(claims: BlockClaims) -> None:
    claims.make([1], HIGH, "a", 0.0)

    assert claims.expire(9.9) == []
    assert claims.expire(10.0) == [1]
    assert claims.cuts.num_shortened == 1
    claims.make([1], CacheRetention(level=100, duration_s=5.0), "a", 20.0)
    assert claims.cuts.num_shortened == 1
    assert claims.cuts.num_dropped_blocks == 0, "they lapsed"
    assert faults(claims) == []


def test_priorities_up_to_the_default_need_no_budget(claims: BlockClaims) -> None:
    assert claims.make(range(100), CacheRetention(level=1), "a", 0.0) == []
    assert claims.expire(1e9) == []
    assert len(claims) == 100


def test_a_released_claim_is_removed_from_the_account(claims: BlockClaims) -> None:
    claims.make([1, 2, 3, 4], HIGH, "a", 0.0)
    for block in (1, 2, 3, 4):
        claims.drop(block)

    assert claims.make([5, 6, 7, 8], HIGH, "a", 0.0) == []
    assert faults(claims) == []


def test_one_tenant_cannot_take_the_cache_from_another() -> None:
    """One tenant pins prompts that are used once; another needs a quarter of the cache."""
    clock = FakeClock()
    engine, executor = make_engine(
        clock=clock, num_blocks=256, max_num_seqs=4, max_seq_len=512, max_num_batched_tokens=2048
    )
    info = executor.info
    random = np.random.default_rng(0)
    keys = iter(range(1, 1000))

    def run(tenant: str, ids: np.ndarray, retention: CacheRetention | None = None) -> int:
        spec = replace(
            make_spec(next(keys), list(ids), max_tokens=2, tenant=tenant), retention=retention
        )
        engine.submit((spec,))
        num_cached = 0
        while engine.has_work:
            changes = engine.step().changes
            num_cached += sum(c.num_cached_tokens for c in changes if isinstance(c, Admitted))
            clock.now_s += 0.01
        return num_cached

    def prompt() -> np.ndarray:
        return random.integers(3, 50, 16 * info.block_size).astype(np.int32)

    for _ in range(20):
        run("hog", prompt(), HIGH)
    prompts = [prompt() for _ in range(4)]
    for ids in prompts:
        run("victim", ids)

    # All but the last block, of which one token is always computed.
    assert [run("victim", ids) for ids in prompts] == [15 * info.block_size] * 4
    assert min(engine.retention_cuts) >= 16, "the operator sees that it was cut"
    engine.check_integrity()


def test_an_executor_with_its_own_cache_is_asked_within_the_budget() -> None:
    info = make_info(num_blocks=16, block_size=4)
    config = SchedulerConfig(
        max_retention_share=0.5, max_tenant_retention_share=0.25, max_retention_s=10.0
    )
    account = EngineRetention(config, info)
    keys = itertools.count(1)

    def ask(tenant: str, now: float, priority: int = 80) -> CacheRetention | None:
        spec = make_spec(next(keys), prompt=16, tenant=tenant)
        spec = replace(spec, retention=CacheRetention(level=priority))
        return account.limit((spec,), now)[0].retention

    assert ask("a", 0.0) == CacheRetention(level=80, duration_s=10.0)
    assert ask("a", 1.0) is None
    assert ask("b", 2.0) is not None
    assert ask("c", 3.0) is None
    assert ask("c", 3.0, priority=DEFAULT_LEVEL) == CacheRetention(level=DEFAULT_LEVEL)
    assert ask("a", 10.0) is not None
    assert (account.cuts.num_shortened, account.cuts.num_dropped_blocks) == (3, 8)


def test_turns_of_a_conversation_are_counted_once_in_an_executors_own_cache() -> None:
    info = make_info(num_blocks=64, block_size=4)
    config = SchedulerConfig(
        max_retention_share=0.5, max_tenant_retention_share=0.25, max_retention_s=10.0
    )
    account = EngineRetention(config, info)

    def ask(key: int, *, conversation: bytes, num_blocks: int, now: float) -> CacheRetention | None:
        spec = make_spec(key, prompt=4 * num_blocks, tenant="a")
        hashes = tuple(b"%s %d" % (conversation, index) for index in range(num_blocks))
        spec = replace(spec, session_id="s", block_hashes=hashes)
        return account.limit((spec,), now)[0].retention

    turns = [ask(turn, conversation=b"one", num_blocks=turn, now=turn) for turn in range(1, 17)]
    assert None not in turns
    assert ask(17, conversation=b"one", num_blocks=17, now=16.0) is None, "beyond its share"
    assert ask(18, conversation=b"two", num_blocks=1, now=16.0) is None
    # The first turns' blocks were asked for again by the last one.
    assert ask(19, conversation=b"two", num_blocks=1, now=25.9) is None
    assert ask(20, conversation=b"two", num_blocks=16, now=26.0) is not None
