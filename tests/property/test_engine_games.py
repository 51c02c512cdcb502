"""Random sequences of a hundred operations on the whole engine, each generated from a seed.

Arrivals, cancels, faults, deadlines, tenants, priorities, both pipeline depths and tiny pools, over
a strict simulated device. `game_laws`, `game_records` and the engine's own `check_integrity` define
the checks after every turn; test_engine_sabotage.py shows that each can fail. A failure names its
seed, which reproduces it.

The seeds are the same in every run. PENSTOCK_FIRST_SEED changes the first, and PENSTOCK_NUM_GAMES
the number of games.
"""

from __future__ import annotations

import os

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.game_runs import played, sights

NUM_GAMES = int(os.environ.get("PENSTOCK_NUM_GAMES", "18"))
FIRST_SEED = int(os.environ.get("PENSTOCK_FIRST_SEED", "0"))
AT_ONCE = 9
MAX_GAMES_FOR_SIGHTS = 120
# What no game can bring about: they need a front, or a device that dies.
ELSEWHERE = {
    FailureReason.REQUEST_ID_IN_USE,  # taken back by the player, which asked for it
    FailureReason.ENGINE_DOWN,
    FailureReason.DRAINING,
    FailureReason.EXECUTOR_REFUSED,
    FailureReason.CONSTRAINT_REFUSED,
    FailureReason.TOO_MANY_OUTPUTS,  # a game's queue has places for more than a request has
}
SIGHTS = {
    *(f"failed {reason.name}" for reason in FailureReason if reason not in ELSEWHERE),
    *(f"finished {reason.name}" for reason in FinishReason),
    "preempted",
    "prefix reused",
    "overtaken",
    "let in for trial",
    "told never to come back",
    "kept for a session",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_GAMES, AT_ONCE))
def test_no_game_breaks_a_law(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        try:
            played(seed)
        except Exception as error:
            error.add_note(f"in the game of seed {seed}: support.game_runs.played({seed})")
            raise


def test_a_game_is_repeatable() -> None:
    """The same seed always gives the same calls, batches and outcomes."""
    for seed in range(2):
        game, again = played(seed).game, played(seed).game
        assert again.executor.log == game.executor.log
        assert [told.end for told in again.history] == [told.end for told in game.history]


def test_games_come_near_every_law() -> None:
    """A law that no game exercises is not checked."""
    unseen = set(SIGHTS)
    for seed in range(MAX_GAMES_FOR_SIGHTS):
        unseen -= set(sights(played(seed)))
        if not unseen:
            return
    raise AssertionError(unseen)
