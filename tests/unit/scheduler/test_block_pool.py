"""How long references of requests, retention and sessions keep blocks in the cache."""

import numpy as np
import pytest

from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.request import CacheRetention
from penstock.scheduler.sessions import SessionKey, Sessions
from support.core import blocks_of

KEY: SessionKey = ("tenant", "conversation", b"salt")
OTHER: SessionKey = ("tenant", "another", b"salt")


def pool_of(num_blocks: int, *, most: int = 100, each: int = 100, ttl_s: float = 10.0) -> BlockPool:
    return BlockPool(
        num_blocks, Sessions(level=60, ttl_s=ttl_s, max_num_blocks=most, max_num_each=each)
    )


def named(pool: BlockPool, count: int) -> list[int]:
    blocks: list[int] = pool.allocate(count).tolist()
    for block in blocks:
        pool.register(block, name(block))
    return blocks


def name(block: int) -> bytes:
    return block.to_bytes(4, "big")


def leave(
    pool: BlockPool, blocks: list[int], priority: int | None = None, duration_s: float = np.inf
) -> None:
    retention = None if priority is None else CacheRetention(level=priority, duration_s=duration_s)
    pool.release(np.array(blocks, dtype=np.int32), retention, now=0.0)
    assert not any(pool.faults())


def levels(pool: BlockPool, blocks: list[int]) -> list[int | None]:
    assert not any(pool.faults())
    return [pool.level(block) for block in blocks]


def evicted(pool: BlockPool, blocks: list[int]) -> list[int]:
    """Allocate blocks until all of `blocks` are evicted; return `blocks` in the order of their
    eviction.
    """
    order: list[int] = []
    while set(blocks) - set(order):
        (block,) = pool.allocate(1).tolist()
        order.append(block)
        assert not any(pool.faults())
    return [block for block in order if block in blocks]


def test_blocks_are_evicted_by_level_and_then_by_age() -> None:
    pool = pool_of(4)
    blocks = named(pool, 4)
    for block, priority in zip(blocks, (90, 0, None, 50), strict=True):
        leave(pool, [block], priority)
    assert evicted(pool, blocks) == [blocks[1], blocks[2], blocks[3], blocks[0]]


@pytest.mark.parametrize("priority", [80, 5])
def test_a_retention_falls_back_to_the_default_when_its_time_is_up(priority: int) -> None:
    pool = pool_of(3)
    a, b, c = named(pool, 3)
    leave(pool, [a])
    leave(pool, [b], priority, duration_s=5.0)
    leave(pool, [c])
    pool.expire(4.9)
    assert levels(pool, [a, b, c]) == [DEFAULT_LEVEL, priority, DEFAULT_LEVEL]
    pool.expire(5.0)
    assert evicted(pool, [a, b, c]) == [a, b, c], "as old as it was"


def test_of_several_priorities_the_highest_counts() -> None:
    pool = pool_of(4)
    blocks = named(pool, 4)
    for twice in range(2):
        del twice
        pool.share(blocks)
    plain, low, low_first, own = ([block] for block in blocks)
    leave(pool, plain, 80)
    leave(pool, plain, 50)
    leave(pool, plain)
    leave(pool, low)
    leave(pool, low, 0)
    leave(pool, low, 0)
    leave(pool, low_first, 0)
    leave(pool, low_first, 0)
    leave(pool, low_first)
    for _ in range(3):
        leave(pool, own, 7)
    assert levels(pool, blocks) == [80, DEFAULT_LEVEL, DEFAULT_LEVEL, 7]


def test_blocks_without_a_digest_are_not_retained() -> None:
    pool = pool_of(2)
    a, b = pool.allocate(2).tolist()
    leave(pool, [a, b], 90)
    assert pool.num_cached == 0
    (block,) = named(pool, 1)
    leave(pool, [block], 90)
    pool.share([block])
    pool.forget(np.array([block], dtype=np.int32))
    leave(pool, [block])
    (again,) = named(pool, 1)
    assert again == block
    leave(pool, [again])
    assert levels(pool, [again]) == [DEFAULT_LEVEL]


def test_a_session_holds_its_blocks_for_its_time() -> None:
    pool = pool_of(4)
    blocks = named(pool, 2)
    pool.hold(KEY, 1, blocks, now=0.0)
    leave(pool, blocks)
    (later,) = named(pool, 1)
    leave(pool, [later])
    assert levels(pool, blocks) == [60, 60]
    pool.sessions.renew(KEY, 9.0)
    pool.expire(18.9)
    assert levels(pool, blocks) == [60, 60]
    pool.expire(19.0)
    assert len(pool.sessions) == 0
    assert evicted(pool, [*blocks, later]) == [*reversed(blocks), later]


def test_over_the_budget_the_least_recently_used_session_expires() -> None:
    pool = pool_of(8, most=4)
    shared, *rest = named(pool, 5)
    pool.hold(KEY, 1, [shared, *rest[:2]], now=0.0)
    pool.hold(OTHER, 2, [shared, rest[2]], now=1.0)
    assert len(pool.sessions._holders) == 4, "a shared block counts once"
    pool.sessions.renew(KEY, 2.0)
    leave(pool, [shared, *rest])
    pool.hold(("", "new", b""), 3, [rest[3]], now=3.0)
    assert blocks_of(pool.sessions, OTHER) == ()
    assert levels(pool, [shared, *rest]) == [60, 60, 60, DEFAULT_LEVEL, 60]


def test_a_block_of_two_sessions_is_kept_until_both_expire() -> None:
    pool = pool_of(4)
    shared, own = named(pool, 2)
    pool.hold(KEY, 1, [shared, own], now=0.0)
    pool.hold(OTHER, 2, [shared], now=5.0)
    leave(pool, [shared, own])
    pool.expire(10.0)
    assert levels(pool, [shared, own]) == [60, DEFAULT_LEVEL]
