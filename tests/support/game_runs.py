"""Plays the games of many seeds, in as many processes as there are cores.

Owns the count of what was played and the report of what failed. Does not know the rules.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

from penstock.scheduler.events import Failed, Finished
from support.engine_player import EnginePlayer, replay
from support.game_draws import DrawnGame

SEEDS_AT_ONCE = 25


@dataclass(slots=True)
class Tally:
    """`num_turns`: engine turns of all games. `seen`: what happened, and how often.

    `failures`: what to say of each failed game.
    """

    num_games: int = 0
    num_turns: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_games += other.num_games
        self.num_turns += other.num_turns
        self.seen.update(other.seen)
        self.failures.extend(other.failures)


def play_all(seeds: range, num_turns: int) -> Tally:
    """One game of `num_turns` turns at least for every seed."""
    total = Tally()
    parts = [seeds[start : start + SEEDS_AT_ONCE] for start in range(0, len(seeds), SEEDS_AT_ONCE)]
    num_workers = max(1, min(len(os.sched_getaffinity(0)), len(parts)))
    # Fresh interpreters: a fork would copy whatever threads other tests left behind.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=watch_parent) as pool:
        for part in pool.map(play_some, parts, [num_turns] * len(parts)):
            total.add(part)
    return total


def watch_parent() -> None:
    """A process of the pool ends with whoever began it, however that ended."""
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Without this a worker of a killed run would play on, and then wait for ever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def play_some(seeds: range, num_turns: int) -> Tally:
    """The same here; the first of them is played a second time from its trace."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in seeds:
            tally.num_games += 1
            try:
                game = DrawnGame(seed)
                game.play(num_turns)
                if seed == seeds[0]:
                    assert_repeatable(game.player)
            # Whatever goes wrong in a game is its result.
            except Exception as error:
                tally.failures.append(failure_of(seed, error))
            else:
                tally.num_turns += game.player.num_turns
                tally.seen.update(sights(game.player))
    return tally


def assert_repeatable(player: EnginePlayer) -> None:
    """The same calls, the same batches and the same news."""
    again = replay(player.dumped())
    assert again.game.executor.log == player.game.executor.log
    assert [told.end for told in again.game.history] == [told.end for told in player.game.history]


def sights(player: EnginePlayer) -> Iterator[str]:
    """What a game showed."""
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


def failure_of(seed: int, error: Exception) -> str:
    """What to say of a failed game: where it failed, and how to have it again."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"seed {seed}: {type(error).__name__} in {place.name}: {str(error) or place.line}\n"
        f"  PYTHONPATH=tests python -m support.game_replay --seed {seed} --shrink"
    )
