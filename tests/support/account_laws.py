"""What must be true of the engine's books after every turn, by what clients were reported.

Owns the comparison of two accounts kept apart: the engine's arrays and queue, and the events that
left it. `Engine.check_integrity` compares the engine with itself.
"""

from __future__ import annotations

from penstock.scheduler.state import RequestState
from support.game_records import Game


def check_accounts(game: Game) -> None:
    """Blocks, slots, queue and wake-up of `game` after a turn."""
    game.engine.check_integrity()
    game.engine.check_next_piece()
    _check_blocks(game)
    _check_members(game)
    _check_wakeup(game)
    _check_sessions(game)


def _check_blocks(game: Game) -> None:
    """free + cached + used = all; used are those in the tables; which does not run has none."""
    arrays, pool = game.engine.arrays, game.engine.cache.pool
    keys, counts = arrays.key.tolist(), arrays.num_blocks.tolist()
    held: set[int] = set()
    for slot, (key, count) in enumerate(zip(keys, counts, strict=True)):
        assert bool(key) is bool(count), f"slot {slot} of request {key} holds {count} blocks"
        if count:
            held.update(arrays.block_table[slot, :count].tolist())
    assert pool.num_used == len(held)
    num_free = pool.num_available - pool.num_cached
    assert num_free >= 0
    assert num_free + pool.num_cached + len(held) == pool.num_blocks


def _check_members(game: Game) -> None:
    """Who lives, runs and waits, and with how many tokens, is what their clients know."""
    assert game.live.keys() == game.engine.requests.keys()
    num_waiting = 0
    for key, told in game.live.items():
        request = game.engine.requests[key]
        assert (request.state is RequestState.PROCESSING) is told.is_running
        if told.is_running:
            num_known = int(game.engine.arrays.num_tokens[request.slot])
        else:
            num_waiting += 1
            num_known = len(request.tokens)
        assert num_known == told.spec.num_prompt_tokens + len(told.tokens)
    assert len(game.engine.queue) == num_waiting
    _check_bounds(game)


def _check_bounds(game: Game) -> None:
    """The queue holds no more than it may, but for those who came back to it."""
    config, fresh = game.config, [told for told in game.waiting() if not told.num_preemptions]
    assert len(fresh) <= config.max_num_waiting
    assert sum(told.spec.num_prompt_tokens for told in fresh) <= config.max_num_waiting_tokens
    most = config.max_num_waiting_per_tenant
    for tenant in {told.spec.tenant for told in fresh} if most is not None else ():
        assert most is not None
        assert sum(told.spec.tenant == tenant for told in fresh) <= most
    most = config.max_num_running_per_tenant
    running = [told.spec.tenant for told in game.live.values() if told.is_running]
    assert most is None or all(running.count(tenant) <= most for tenant in set(running))


def _check_wakeup(game: Game) -> None:
    """No client's time passes while the engine sleeps."""
    first_s = min((told.expiry_s for told in game.live.values()), default=None)
    assert first_s is None or game.engine.next_wakeup_s() <= first_s


def _check_sessions(game: Game) -> None:
    """Sessions hold no more together than their share of the pool."""
    pool = game.engine.cache.pool
    most = max(1, int(game.config.max_session_share * pool.num_blocks))
    game.num_held_blocks = max(game.num_held_blocks, len(pool.sessions._holders))
    assert len(pool.sessions._holders) <= most
