"""A game's trace is the whole game: what it was built with, and every call."""

from __future__ import annotations

from penstock.scheduler.config import EvictionPolicy, SchedulingOrder
from support.engine_player import replay
from support.game_draws import DrawnGame
from support.game_runs import assert_repeatable

NUM_GAMES = 30
NUM_TURNS = 20


def test_a_trace_keeps_every_setting_and_every_call() -> None:
    seen: set[object] = set()
    for seed in range(NUM_GAMES):
        game = DrawnGame(seed)
        game.play(NUM_TURNS)
        config, trace = game.player.game.config, game.player.dumped()
        again = replay(trace)
        assert again.dumped() == trace
        assert again.game.config == config
        assert_repeatable(game.player)
        seen |= {config.eviction, config.order}
    assert seen == {*EvictionPolicy, *SchedulingOrder}
