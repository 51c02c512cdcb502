"""How the value of cached blocks is computed, which hits are recorded, and in which order a pool
evicts blocks by value.
"""

import numpy as np
import pytest

from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.cached_blocks import EvictionOrder, RecencyOrder
from penstock.scheduler.hit_density import NUM_BINS, HitDensity, HitDensityOrder, bin_of

EDGES = [0] + [edge << octave for octave in range(24) for edge in (16, 24)]


def test_age_bins_are_half_octaves() -> None:
    ages = [age for edge in EDGES[1:] for age in (edge - 1, edge)]
    assert [bin_of(0), *map(bin_of, ages)] == [
        min(NUM_BINS - 1, i) for i in [0] + [j for k in range(1, len(EDGES)) for j in (k - 1, k)]
    ]


def test_a_value_is_the_best_rate_until_any_age() -> None:
    density = HitDensity(2, half_life=1000)
    density.note_unused(1, 4)
    density.note_hit(1, 20, 2)
    density.refit()
    # Bins of 16, 8 and 8 turns with 4, 4 and then 2 blocks, each counted at both ends of a bin.
    until_20 = 2 / (2 * 4 * 16 + (4 + 2) * 8)
    assert density.table[1][0] == until_20
    assert density.table[1][1] == 2 / ((4 + 2) * 8)
    assert density.table[1][2] == 0.0, "none came later"
    assert density.table[0] == [0.0] * NUM_BINS


def test_old_hits_lose_weight() -> None:
    density = HitDensity(1, half_life=10)
    density.note_unused(0, 100)
    density.note_hit(0, 0, 100)
    density.refit()
    first = density.table[0][0]
    density.note_unused(0, 100)
    for _ in range(8):
        density.refit()
    assert 0.0 < density.table[0][0] < first


def hits_of_conversations(order: EvictionOrder | None, num_common: int = 0) -> float:
    """Return the prefix cache hit rate, in blocks, over prompts that occur once and infrequent
    turns of two conversations.

    All prompts begin with the same `num_common` blocks, which do not count.
    """
    pool = BlockPool(64, order=order)
    num_found, num_asked = 0, 0

    def ask(name: str, length: int) -> None:
        nonlocal num_found, num_asked
        digests = [f"common {place}".encode() for place in range(num_common)]
        digests += [f"{name} {place}".encode() for place in range(length)]
        found = pool.match(digests)
        pool.share(found)
        new = pool.allocate(len(digests) - len(found))
        table = np.concatenate((np.array(found, dtype=np.int32), new))
        pool.register_chain(table, digests, range(len(found), len(digests)))
        pool.release(table)
        num_found, num_asked = num_found + max(0, len(found) - num_common), num_asked + length
        assert pool.num_available == 64

    for turn in range(600):
        ask(f"once {turn}", 10)
        if turn % 8 == 0:
            ask(f"conversation {turn // 8 % 2}", 16)
    assert not any(pool.faults())
    return num_found / num_asked


@pytest.mark.parametrize("num_common", [0, 1, 5])
def test_blocks_that_are_used_again_are_kept_among_blocks_used_once(num_common: int) -> None:
    assert hits_of_conversations(None, num_common) == 0.0
    assert hits_of_conversations(RecencyOrder(), num_common) == 0.0
    learnt = hits_of_conversations(HitDensityOrder(64, refit_every=20), num_common)
    assert learnt > 0.5 * (16 / 8) / (10 + 16 / 8), "of all that could be found"
    again = hits_of_conversations(HitDensityOrder(64, refit_every=20), num_common)
    assert learnt == again


def test_no_more_is_remembered_than_the_pool_has_blocks() -> None:
    order = HitDensityOrder(4)
    pool = BlockPool(4, order=order)
    for index in range(50):
        table = pool.allocate(1)
        pool.register_chain(table, [index.to_bytes(2, "big")], range(1))
        pool.release(table)
    assert not any(pool.faults())


@pytest.mark.parametrize("level_first", [True, False])
def test_without_statistics_the_tail_of_the_oldest_chain_is_evicted(level_first: bool) -> None:
    pool = BlockPool(6, order=HitDensityOrder(6))
    tables = [pool.allocate(3) for _ in range(2)]
    for name, table in zip("ab", tables, strict=True):
        pool.register_chain(table, [f"{name}{i}".encode() for i in range(3)], range(3))
    for table in tables[:: 1 if level_first else -1]:
        pool.release(table)
    first, second = tables[:: 1 if level_first else -1]
    assert pool.allocate(4).tolist() == [*first[::-1].tolist(), second[2]]
