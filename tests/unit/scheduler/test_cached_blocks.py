"""The order in which cached blocks are evicted."""

import pytest

from penstock.scheduler.cached_blocks import DEFAULT_LEVEL, CachedBlocks, RecencyOrder


def popped(cached: CachedBlocks) -> list[int]:
    order: list[int] = []
    while len(cached):
        assert not any(cached.faults())
        order += cached.pop(1)
        assert order[-1] not in cached
    return order


def test_within_a_level_the_least_recently_used_block_is_evicted_first() -> None:
    cached = CachedBlocks()
    for block in (3, 1, 2):
        cached.extend([block])
    cached.discard([1, 9])
    cached.extend([1])
    assert popped(cached) == [3, 2, 1]
    with pytest.raises(KeyError):
        cached.pop(1)[0]


def test_lower_levels_are_evicted_first_regardless_of_age() -> None:
    cached = CachedBlocks()
    for block, level in ((1, 80), (2, DEFAULT_LEVEL), (3, 0), (4, 80), (5, 0), (6, 60)):
        cached.extend([block], level)
    assert [block in cached for block in (1, 2, 3, 7)] == [True, True, True, False]
    assert cached.level(6) == 60
    assert popped(cached) == [3, 5, 2, 6, 1, 4]


def test_a_block_that_changes_its_level_keeps_its_age() -> None:
    cached = CachedBlocks()
    for block, level in ((1, 35), (2, 80), (3, 35), (4, 80), (5, 35)):
        cached.extend([block], level)
    cached.move(4, DEFAULT_LEVEL)
    cached.move(2, DEFAULT_LEVEL)
    cached.move(1, 60)
    cached.move(1, 60)
    assert cached.level(1) == 60
    assert sorted(cached.blocks()) == [1, 2, 3, 4, 5]
    assert popped(cached) == [2, 3, 4, 5, 1]


def test_a_block_that_moved_can_be_taken_and_come_again() -> None:
    cached = CachedBlocks()
    cached.extend([1], 80)
    cached.extend([2])
    cached.move(1, DEFAULT_LEVEL)
    cached.discard([1])
    assert 1 not in cached
    assert len(cached) == 1
    cached.extend([1])
    assert popped(cached) == [2, 1]


def test_repeated_moves_between_levels_leave_no_stale_entries() -> None:
    cached = CachedBlocks()
    for block in range(4):
        cached.extend([block])
    for turn in range(1000):
        cached.move(turn % 4, 90 if cached.level(turn % 4) == DEFAULT_LEVEL else DEFAULT_LEVEL)
    assert not any(cached.faults())
    orders = [*cached._others.values(), cached.order]
    assert sum(len(order._heap) for order in orders if isinstance(order, RecencyOrder)) < 300
    assert popped(cached) == [0, 1, 2, 3]
