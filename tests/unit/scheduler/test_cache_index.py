"""What a watch of the index of cached blocks reports. Without a watch, the index records
nothing.
"""

from __future__ import annotations

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.cache_index import CachedBlock, CacheIndex, CacheWatch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec
from support.self_paced import make_self_paced

BLOCK = 16


def chain(salt: bytes, num_blocks: int, first: int = 0) -> tuple[tuple[bytes, ...], bytes]:
    """Return the digests of a chain of blocks, and its tokens as bytes. The token ids count up from
    `first`.
    """
    tokens = np.arange(first, first + num_blocks * BLOCK, dtype=np.int32)
    return hash_blocks(tokens, BLOCK, chain_root(salt)), tokens.tobytes()


def stored(watch: CacheWatch) -> list[bytes]:
    return [
        one.digest if isinstance(one, CachedBlock) else b"lost " + one
        for one in watch.take_changes()
    ]


def test_a_watch_receives_only_its_salt() -> None:
    cache_index = CacheIndex(BLOCK)
    mine, theirs = cache_index.watch(b"mine"), cache_index.watch(b"theirs")
    digests, tokens = chain(b"mine", 3)

    cache_index.note_registered(b"mine", digests, range(3), tokens)
    cache_index.note_unregistered([digests[2]])

    assert stored(mine) == [*digests, b"lost " + digests[2]]
    assert stored(theirs) == []
    assert cache_index.watch(b"theirs").num_blocks == 0


def test_a_block_is_reported_with_its_parent_and_its_tokens() -> None:
    cache_index = CacheIndex(BLOCK)
    watch = cache_index.watch(b"s")
    digests, tokens = chain(b"s", 2)

    cache_index.note_registered(b"s", digests, range(1, 2), tokens[4 * BLOCK :])
    cache_index.note_registered(b"s", digests, range(2), tokens)  # the second is known by now

    assert watch.take_changes() == [
        CachedBlock(digest=digests[1], parent=digests[0], tokens=tokens[4 * BLOCK :]),
        CachedBlock(digest=digests[0], parent=b"", tokens=tokens[: 4 * BLOCK]),
    ]
    # The parent was registered after its child, and still comes before it.
    late = cache_index.watch(b"s")
    assert [block.digest for block in late.take_blocks(5)] == list(digests)


def test_a_snapshot_is_of_when_the_watch_began() -> None:
    cache_index = CacheIndex(BLOCK)
    digests, tokens = chain(b"s", 4)
    cache_index.note_registered(b"s", digests, range(4), tokens)
    watch = cache_index.watch(b"s")

    first = watch.take_blocks(1)
    cache_index.note_unregistered(digests[2:])

    assert [block.digest for block in (*first, *watch.take_blocks(9))] == list(digests)
    assert stored(watch) == [b"lost " + digest for digest in digests[2:]]


def test_changes_that_are_not_taken_are_bounded() -> None:
    cache_index = CacheIndex(BLOCK, max_num_changes=3)
    watch = cache_index.watch(b"s")
    digests, tokens = chain(b"s", 4)

    cache_index.note_registered(b"s", digests[:3], range(3), tokens[: 12 * BLOCK])
    overruns = [watch.is_overrun]
    cache_index.note_registered(b"s", digests, range(3, 4), tokens[12 * BLOCK :])
    overruns.append(watch.is_overrun)

    assert overruns == [False, True]
    assert watch.take_changes() == []


def test_an_unwatched_index_records_nothing() -> None:
    cache_index = CacheIndex(BLOCK)
    watch = cache_index.watch(b"s")
    cache_index.unwatch(watch)
    digests, tokens = chain(b"s", 1)

    cache_index.note_registered(b"s", digests, range(1), tokens)
    cache_index.note_unregistered(digests)

    assert watch.take_changes() == []
    assert cache_index.num_blocks == 0


def simulated_engine() -> Engine:
    config = ExecutorConfig(kind=ExecutorKind.SIMULATED, num_blocks=8, max_seq_len=96)
    return Engine(create_executor(config), SchedulerConfig(), lambda: 0.0)


def run(engine: Engine, key: int, ids: list[int]) -> None:
    tokens = np.array(ids, dtype=np.int32)
    digests = hash_blocks(tokens, BLOCK, chain_root(b"s"))
    engine.submit(
        (
            RequestSpec(
                key=key, request_id=str(key), prompt_ids=tokens, max_tokens=8,
                hash_salt=b"s", block_hashes=digests,
            ),
        )
    )  # fmt: skip
    for _ in range(40):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("it does not end")


def test_an_engine_reports_cached_and_evicted_blocks() -> None:
    engine = simulated_engine()
    cache_index = engine.enable_cache_index()
    watch = cache_index.watch(b"s")

    for key in range(1, 5):
        run(engine, key, [key] * 33)

    changes = watch.take_changes()
    lost = [one for one in changes if isinstance(one, bytes)]
    named = {one.digest for one in changes if isinstance(one, CachedBlock)}
    assert lost, "eight blocks hold no four requests"
    assert named - set(lost) == set(cache_index._chain_of)
    engine.check_integrity()


def test_no_cache_index_exists_unless_enabled() -> None:
    engine = simulated_engine()

    run(engine, 1, [1] * 33)

    assert engine.cache.pool.cache_index is None


def test_the_cache_of_a_self_paced_executor_is_not_reported() -> None:
    engine, _ = make_self_paced()

    with pytest.raises(ValueError, match="its own cache"):
        engine.enable_cache_index()
