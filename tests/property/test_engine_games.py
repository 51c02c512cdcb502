"""Games of a hundred turns over the whole engine, each drawn from its seed.

Arrivals, cancels, faults, deadlines, tenants, priorities, both pipeline depths and tiny pools, over
a strict simulated device. What is checked after every turn is in the modules of laws
(`account_laws`, `order_laws`, `order_witness`, `end_laws`, `foresight_laws`, and the engine's own
`check_integrity`); that each of them can fail is shown by test_engine_sabotage.py. A failure names
its seeds and the command that plays one of them again, and makes it smaller.

The seeds are the same in every run. PENSTOCK_FIRST_SEED moves them and PENSTOCK_NUM_GAMES plays
more of them, to look further.
"""

from __future__ import annotations

import os

import pytest

from penstock.scheduler.request import FailureReason, FinishReason
from support.game_replay import NUM_TURNS
from support.game_runs import play_all

NUM_GAMES = int(os.environ.get("PENSTOCK_NUM_GAMES", "120"))
MAX_FAILURES_SHOWN = 10
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


@pytest.mark.timeout(1800)
def test_no_game_breaks_a_law() -> None:
    first = int(os.environ.get("PENSTOCK_FIRST_SEED", "0"))

    tally = play_all(range(first, first + NUM_GAMES), NUM_TURNS)

    shown = "\n".join(tally.failures[:MAX_FAILURES_SHOWN])
    assert not tally.failures, f"{len(tally.failures)} games failed, among them\n{shown}"
    assert tally.num_games == NUM_GAMES
    assert tally.num_turns >= NUM_GAMES * NUM_TURNS
    # A law that nothing ever comes near is not checked.
    assert {sight for sight in SIGHTS if tally.seen[sight] < max(1, NUM_GAMES // 250)} == set()
