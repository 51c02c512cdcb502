"""Runs the game of a seed, and returns its history. Does not contain the invariants."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

from penstock.scheduler.events import Failed, Finished
from support.engine_player import EnginePlayer
from support.game_draws import DrawnGame

NUM_TURNS = 100


def played(seed: int, num_turns: int = NUM_TURNS) -> EnginePlayer:
    """Run at least `num_turns`, then to the end. Raise AssertionError if a law is broken."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        game = DrawnGame(seed)
        game.play(num_turns)
    return game.player


def sights(player: EnginePlayer) -> Iterator[str]:
    """Return which situations a game reached."""
    game = player.game
    for told in game.history:
        assert told.end is not None
        yield f"{'finished' if isinstance(told.end, Finished) else 'failed'} {told.end.reason.name}"
        if isinstance(told.end, Failed) and told.end.retry_after_s == math.inf:
            yield "told never to come back"
        if told.num_preemptions:
            yield "preempted"
        if told.is_trial:
            yield "let in for trial"
        if told.num_cached_tokens:
            yield "prefix reused"
    if game.witness is not None and game.witness.num_passes:
        yield "overtaken"
    if game.num_held_blocks:
        yield "kept for a session"
