"""The integrity check of an idle engine finds every fault, whether it runs at once or
in small pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler import check_pieces
from penstock.scheduler.block_pool import BlockPool
from penstock.scheduler.config import EvictionPolicy
from penstock.scheduler.engine import Engine
from penstock.scheduler.integrity import IntegrityError
from penstock.scheduler.request import CacheRetention
from penstock.scheduler.retention import RetentionBudget
from support.core import make_engine, make_spec, run_until_idle

NUM_BLOCKS = 4 * check_pieces.PIECE


def engine_of(eviction: EvictionPolicy = EvictionPolicy.LRU) -> Engine:
    """Return an idle engine with free blocks, blocks that are cached at two retention levels, and
    blocks that a session holds.
    """
    engine, _ = make_engine(
        num_blocks=NUM_BLOCKS,
        max_seq_len=2 * NUM_BLOCKS,
        eviction=eviction,
        session_ttl_s=100.0,
        max_num_batched_tokens=8192,
    )
    engine.enable_cache_index()
    serve(engine, 1, NUM_BLOCKS)
    serve(engine, 100, NUM_BLOCKS, retention=CacheRetention(level=80, duration_s=50.0))
    serve(engine, 200, 9, session_id="a")
    return engine


def serve(engine: Engine, key: int, num_prompt: int, **fields: Any) -> None:
    engine.submit((replace(make_spec(key, num_prompt), **fields),))
    while engine.has_work:
        engine.step()


def check_in_pieces(engine: Engine) -> int:
    num_pieces = 1
    while not engine.check_next_piece():
        num_pieces += 1
    return num_pieces


def pool_of(engine: Engine) -> BlockPool:
    return engine.cache.pool


def last_cached(pool: BlockPool) -> int:
    return max(pool._cached.order.blocks())


def lose_free_block(pool: BlockPool) -> None:
    pool._num_free -= 1


def put_free_block_twice(pool: BlockPool) -> None:
    pool._stack[pool._num_free - 1] = pool._stack[0]


def use_free_block(pool: BlockPool) -> None:
    pool.ref_counts[pool._stack[0]] = 1


def owe_reference(pool: BlockPool) -> None:
    pool.ref_counts[last_cached(pool)] = -1


def miscount_available(pool: BlockPool) -> None:
    pool.num_available += 1


def cache_free_block(pool: BlockPool) -> None:
    pool._cached.extend([int(pool._stack[0])])


def lose_cached_block(pool: BlockPool) -> None:
    pool._cached.discard([last_cached(pool)])


def unmark_name(pool: BlockPool) -> None:
    pool._is_hashed[last_cached(pool)] = False


def swap_names(pool: BlockPool) -> None:
    (first, one), (second, other) = list(pool._hash_of.items())[:2]
    pool._hash_of[first], pool._hash_of[second] = other, one


def lose_name(pool: BlockPool) -> None:
    del pool._block_of[pool._hash_of[last_cached(pool)]]


def forget_in_book(pool: BlockPool) -> None:
    assert pool.cache_index is not None
    pool.cache_index.note_unregistered([pool._hash_of[last_cached(pool)]])


def move_level(pool: BlockPool) -> None:
    pool._cached.move(last_cached(pool), 99)


def claim_nameless_block(pool: BlockPool) -> None:
    blocks = [int(pool._stack[0])]
    pool._claims.make(blocks, CacheRetention(level=80, duration_s=50.0), "a", 0.0)


def miscount_low_claims(pool: BlockPool) -> None:
    pool._claims._num_low += 1


def keep_claims_for_ever(pool: BlockPool) -> None:
    pool._claims._ends.clear()


def claim_beyond_budget(pool: BlockPool) -> None:
    pool._claims._budget = RetentionBudget(
        max_num_blocks=0, max_num_of_tenant=0, max_duration_s=1.0
    )


def lose_owner_of_claim(pool: BlockPool) -> None:
    pool._claims._tenant_of.popitem()


def lose_session_block(pool: BlockPool) -> None:
    pool.sessions._holders.popitem()


def hold_without_looking(pool: BlockPool) -> None:
    pool._has_standing = False


ANY_ORDER = [
    lose_free_block,
    put_free_block_twice,
    use_free_block,
    owe_reference,
    miscount_available,
    cache_free_block,
    lose_cached_block,
    unmark_name,
    swap_names,
    lose_name,
    forget_in_book,
    move_level,
    claim_nameless_block,
    miscount_low_claims,
    keep_claims_for_ever,
    claim_beyond_budget,
    lose_owner_of_claim,
    lose_session_block,
    hold_without_looking,
]


def age_order(pool: BlockPool) -> None:
    added: Any = pool._cached.order
    added.added.move_to_end(next(iter(added.added)))


def rejuvenate(pool: BlockPool) -> None:
    pool._cached.order.num_ticks = 1


def misplace_segment(pool: BlockPool) -> None:
    order: Any = pool._cached.order
    order._segment_of[last_cached(pool)] = order._segment_of[int(pool._stack[0])]


def miscount_uses(pool: BlockPool) -> None:
    order: Any = pool._cached.order
    order._history.uses[last_cached(pool)] = 7


def use_too_often(pool: BlockPool) -> None:
    order: Any = pool._cached.order
    order._history.uses[int(pool._stack[0])] = 99


def miscount_segments(pool: BlockPool) -> None:
    order: Any = pool._cached.order
    order._num_in_segments += 1


CASES = [
    *((EvictionPolicy.LRU, damage) for damage in (*ANY_ORDER, age_order, rejuvenate)),
    *(
        (EvictionPolicy.HIT_DENSITY, damage)
        for damage in (
            *ANY_ORDER,
            misplace_segment,
            miscount_uses,
            use_too_often,
            miscount_segments,
        )
    ),
]


@pytest.mark.parametrize(
    ("eviction", "damage"),
    CASES,
    ids=[f"{eviction.name.lower()}-{damage.__name__}" for eviction, damage in CASES],
)
def test_every_fault_is_found_in_pieces_as_at_once(
    eviction: EvictionPolicy, damage: Callable[[BlockPool], None]
) -> None:
    engine = engine_of(eviction)
    engine.check_integrity()
    check_in_pieces(engine)

    damage(pool_of(engine))

    with pytest.raises(IntegrityError) as at_once:
        engine.check_integrity()
    with pytest.raises(IntegrityError) as in_pieces:
        check_in_pieces(engine)
    assert str(in_pieces.value) == str(at_once.value)


def test_a_fault_of_the_rest_is_found_in_pieces() -> None:
    engine = engine_of()
    engine.tenants.num_running[0] += 1

    with pytest.raises(IntegrityError, match="miscounted"):
        check_in_pieces(engine)


def check_in_short_pauses(engine: Engine, num_pieces: int) -> None:
    """Run steps, each after `num_pieces` pieces of the check. These are too few to complete a
    check.
    """
    for _ in range(NUM_BLOCKS):
        assert not any(engine.check_next_piece() for _ in range(num_pieces))
        engine.step()


def test_pauses_too_short_for_a_whole_check_reach_every_block() -> None:
    engine = engine_of()
    pool = pool_of(engine)
    num_pieces = check_in_pieces(engine)
    damage = {"hash index": swap_names, "twice": put_free_block_twice}
    for reported, break_it in damage.items():
        before = dict(pool._hash_of), pool._stack.copy()
        break_it(pool)
        with pytest.raises(IntegrityError, match=reported):
            check_in_short_pauses(engine, num_pieces // 3)
        pool._hash_of, pool._stack = before


def test_a_check_begins_again_when_the_engine_works() -> None:
    engine = engine_of()
    for key in range(300, 330):
        assert not any(engine.check_next_piece() for _ in range(3))
        serve(engine, key, NUM_BLOCKS // 4 + key)
        engine.submit((make_spec(key + 100, 8),))
        assert not engine.check_next_piece()
        engine.cancel(key + 100)
        assert not engine.check_next_piece()
        run_until_idle(engine)
    check_in_pieces(engine)


def test_a_piece_checks_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    num_pieces, sizes = check_in_pieces(engine), list[int]()
    original = BlockPool.faults_at

    def noted(pool: BlockPool, places: range) -> Any:
        sizes.append(len(places))
        return original(pool, places)

    monkeypatch.setattr(BlockPool, "faults_at", noted)
    assert check_in_pieces(engine) == num_pieces
    assert sum(sizes) == NUM_BLOCKS
    assert max(sizes) <= check_pieces.PIECE
    assert num_pieces >= NUM_BLOCKS // check_pieces.PIECE


@pytest.mark.parametrize("count", [0, 1, check_pieces.PIECE, 3 * check_pieces.PIECE + 1])
def test_pieces_together_contain_every_item_once(count: int) -> None:
    cut = list(check_pieces.pieces(range(count)))
    assert [number for piece in cut for number in piece] == list(range(count))
    assert all(0 < len(piece) <= check_pieces.PIECE for piece in cut)


def test_order_is_checked_across_pieces() -> None:
    numbers = list(range(2 * check_pieces.PIECE))
    assert all(check_pieces.is_sorted(numbers))
    numbers[check_pieces.PIECE] = 0
    assert not all(check_pieces.is_sorted(numbers))
