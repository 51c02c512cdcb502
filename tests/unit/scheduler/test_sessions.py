"""Sessions and retention in the engine: which blocks a turn keeps, and which are evicted."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Preempted, StepEvents
from penstock.scheduler.request import CacheRetention, FinishReason, RequestSpec
from penstock.scheduler.retention import as_retention
from penstock.scheduler.sessions import session_key
from support.core import (
    BLOCK_SIZE,
    SALT,
    FakeClock,
    blocks_of,
    make_engine,
    make_info,
    make_spec,
    run_until_idle,
)

TOKEN = 7
"""The token that the executor always returns."""


def engine_of(
    num_blocks: int, clock: FakeClock | None = None, *, depth: int = 1, **config: Any
) -> Engine:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 2048,
        "watermark": 0.0,
        "session_ttl_s": 100.0,
        "max_session_share": 1.0,
    }
    return make_engine(
        clock=clock, num_blocks=num_blocks, pipeline_depth=depth, **(settings | config)
    )[0]


def turn(key: int, session_id: str = "a", prompt: list[int] | None = None) -> RequestSpec:
    """Return a turn with four output tokens and, unless `prompt` is given, eight prompt tokens. All
    tokens but the last are computed: 11, which fill two blocks of four and begin a third.
    """
    made = make_spec(key, prompt or list(range(8)), max_tokens=4)
    return replace(made, session_id=session_id)


def reported(engine: Engine, *specs: RequestSpec) -> list[StepEvents]:
    for spec in specs:
        engine.submit((spec,))
    events = run_until_idle(engine)
    engine.check_integrity()
    return events


def num_cached(events: list[StepEvents], key: int) -> int:
    """Return how many prompt tokens were in the cache when the request was first admitted."""
    return next(
        change.num_cached_tokens
        for event in events
        for change in event.changes
        if isinstance(change, Admitted) and change.key == key
    )


def other_request(key: int, num_blocks: int) -> RequestSpec:
    """Return a request without a session that uses `num_blocks` blocks when it ends."""
    return make_spec(key, (num_blocks - 1) * BLOCK_SIZE, max_tokens=BLOCK_SIZE + 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_finds_the_prompt_and_the_output_of_the_turn_before(depth: int) -> None:
    engine = engine_of(16, depth=depth)
    first = replace(turn(1), max_tokens=5)
    reported(engine, first)
    conversation = [*range(8), TOKEN, TOKEN, TOKEN, TOKEN, TOKEN, 20, 21]
    # 8 + 5 tokens, the last of which was sampled and never computed: 12 are, three blocks.
    assert num_cached(reported(engine, turn(2, prompt=conversation)), 2) == 12


def test_a_block_is_full_only_when_its_last_token_was_computed() -> None:
    engine = engine_of(16)
    reported(engine, turn(1))
    # 12 tokens, 11 computed: the third block lacks its last.
    assert num_cached(reported(engine, turn(2, prompt=[*range(8), *[TOKEN] * 4, 20])), 2) == 8


def test_sessions_outlast_the_blocks_of_others() -> None:
    engine = engine_of(8)
    reported(engine, turn(1))
    for key in range(2, 6):
        reported(engine, other_request(key, 5))
    assert num_cached(reported(engine, turn(9, prompt=list(range(9)))), 9) == 8
    without = engine_of(8)
    reported(without, turn(1, session_id=""))
    for key in range(2, 6):
        reported(without, other_request(key, 5))
    assert num_cached(reported(without, turn(9, prompt=list(range(9)))), 9) == 0


def test_sessions_yield_before_running_work_does() -> None:
    engine = engine_of(6)
    reported(engine, turn(1), turn(2, "b", prompt=list(range(50, 58))))
    assert len(engine.cache.pool.sessions._holders) == 4
    events = reported(engine, other_request(3, 3), other_request(4, 3))
    changes = [change for event in events for change in event.changes]
    assert not [change for change in changes if isinstance(change, Preempted)]
    assert {c.at_s for c in changes if isinstance(c, Admitted)} == {0.0}, "both at once"
    assert num_cached(reported(engine, turn(9, prompt=list(range(9)))), 9) == 0


def test_a_session_expires_after_its_time_to_live() -> None:
    clock = FakeClock()
    engine = engine_of(8, clock)
    reported(engine, turn(1))
    clock.now_s = 99.0
    reported(engine, turn(2))
    clock.now_s = 198.0
    reported(engine, other_request(3, 6))
    assert num_cached(reported(engine, turn(4, prompt=list(range(9)))), 4) == 8
    clock.now_s = 298.1
    reported(engine, other_request(5, 6), other_request(6, 6))
    assert num_cached(reported(engine, turn(7, prompt=list(range(9)))), 7) == 0


def test_a_turn_that_waits_renews_its_session() -> None:
    clock = FakeClock()
    engine = engine_of(16, clock)
    reported(engine, turn(1))
    clock.now_s = 90.0
    engine.submit((turn(2, prompt=list(range(9))),))
    clock.now_s = 150.0
    engine.transitions.expire(clock.now_s)
    assert len(engine.cache.pool.sessions._holders) == 2
    run_until_idle(engine)


def test_the_share_of_the_pool_is_a_budget() -> None:
    engine = engine_of(8, max_session_share=0.25)
    reported(engine, turn(1))
    reported(engine, turn(2, "b", prompt=list(range(50, 58))))
    sessions = engine.cache.pool.sessions
    assert len(sessions._holders) == 2
    assert blocks_of(sessions, ("", "a", SALT)) == ()


def test_a_tenant_with_many_sessions_loses_its_own_oldest() -> None:
    engine = engine_of(16, max_tenant_session_share=0.25)
    sessions = engine.cache.pool.sessions
    reported(engine, replace(turn(1, prompt=list(range(50, 58))), tenant="quiet"))
    for key in range(2, 7):
        prompt = list(range(100 * key, 100 * key + 8))
        reported(engine, replace(turn(key, f"s{key}", prompt=prompt), tenant="hog"))
    assert len(blocks_of(sessions, ("quiet", "a", SALT))) == 2
    held = [len(blocks_of(sessions, ("hog", f"s{key}", SALT))) for key in range(2, 7)]
    assert held == [0, 0, 0, 2, 2]
    # One that is larger than the share keeps its head.
    reported(engine, replace(turn(7, "long", prompt=list(range(900, 924))), tenant="hog"))
    assert len(blocks_of(sessions, ("hog", "long", SALT))) == 4


def test_a_session_keeps_so_many_tokens_of_its_head() -> None:
    engine = engine_of(16, max_session_tokens=2 * BLOCK_SIZE)
    reported(engine, turn(1, prompt=list(range(16))))
    assert len(blocks_of(engine.cache.pool.sessions, ("", "a", SALT))) == 2


def test_tenants_and_salts_have_their_own_sessions() -> None:
    specs = (
        turn(1),
        replace(turn(2), tenant="x"),
        replace(turn(3), hash_salt=b"other"),
        replace(turn(4), session_id="b"),
    )
    assert len({session_key(spec) for spec in specs}) == 4
    assert session_key(replace(turn(5), hash_salt=b"")) is None
    assert session_key(turn(6, session_id="")) is None


def test_outputs_of_one_turn_are_all_kept() -> None:
    engine = engine_of(32)
    leader = replace(turn(1), max_tokens=5)
    follower = replace(leader, key=2, leader_key=1, output_index=1)
    engine.submit((leader, follower))
    run_until_idle(engine)
    engine.check_integrity()
    kept = blocks_of(engine.cache.pool.sessions, ("", "a", SALT))
    digests = hash_blocks(
        replace(turn(3), prompt_ids=turn(3).prompt_ids).prompt_ids, BLOCK_SIZE, chain_root(SALT)
    )
    assert kept[:2] == tuple(engine.cache.pool.match(digests))
    assert len(kept) == 3


def test_a_turn_that_is_cancelled_or_preempted_keeps_what_was_computed() -> None:
    engine = engine_of(16)
    engine.submit((turn(1),))
    engine.step()
    engine.transitions.preempt(engine.requests[1], 0.0)
    assert len(engine.cache.pool.sessions._holders) == 0, "its turn is not over"
    engine.step()
    engine.cancel(1, FinishReason.CANCELLED)
    assert len(engine.cache.pool.sessions._holders) == 2
    engine.check_integrity()


def test_retention_works_without_a_session() -> None:
    clock = FakeClock()
    engine = engine_of(8, clock)
    keep = CacheRetention(level=90, duration_s=5.0)
    reported(engine, replace(turn(1, session_id=""), retention=keep))
    reported(engine, other_request(2, 6), other_request(3, 6))
    assert num_cached(reported(engine, turn(4, "", prompt=list(range(9)))), 4) == 8
    clock.now_s = 5.1
    reported(engine, other_request(5, 6), other_request(6, 8))
    assert num_cached(reported(engine, turn(7, "", prompt=list(range(9)))), 7) == 0


def test_an_executor_with_its_own_cache_is_asked_for_a_retention() -> None:
    config = SchedulerConfig(session_ttl_s=9.0, session_retention_level=70)
    asked = as_retention(turn(1), config)
    assert asked.retention == CacheRetention(level=70, duration_s=9.0)
    assert asked.session_id == "", "and there is no second account of it here"
    higher = CacheRetention(level=71, duration_s=1.0)
    assert as_retention(replace(turn(1), retention=higher), config).retention == higher
    lower = CacheRetention(level=5)
    asked = as_retention(replace(turn(1), retention=lower), config)
    assert asked.retention == CacheRetention(level=70, duration_s=9.0)
    plain = make_spec(2)
    assert as_retention(plain, config) is plain


def test_a_self_paced_engine_is_given_the_retention() -> None:
    engine, _ = make_engine(replace(make_info(), is_self_paced=True))
    engine.submit((turn(1),))
    batch = engine.schedule(0.0)
    assert batch is not None
    (request,) = batch.admitted
    assert request.spec.retention == CacheRetention(level=60, duration_s=300.0)
