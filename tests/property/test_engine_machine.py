"""The engine over a strict simulated device, for any order of request events.

Hypothesis generates clients, time and faults with the probabilities and laws of
test_engine_games.py; it generates other games in every run, shrinks a failing one, and prints each
of its calls.
"""

from __future__ import annotations

import os
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.scheduler.request import FinishReason
from support.engine_player import EnginePlayer
from support.game_draws import draw_request, draw_setup

RANDOMS = st.randoms(note_method_calls=True)


class EngineMachine(RuleBasedStateMachine):
    """Clients, clock and faults against one engine."""

    live = Bundle("live")

    @initialize(random=RANDOMS)
    def build(self, random: Random) -> None:
        self.player = EnginePlayer(**draw_setup(random))

    @rule(target=live, random=RANDOMS)
    def submit(self, random: Random) -> object:
        return multiple(*self.player.submit(**draw_request(random)))

    @precondition(lambda self: self.player.game.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        self.player.step(count=count)

    @rule(key=consumes(live), reason=st.sampled_from([*FinishReason, None]))
    def cancel(self, key: int, reason: FinishReason | None) -> None:
        self.player.cancel(key=key, reason=None if reason is None else int(reason))

    @rule(key=live)
    def submit_a_live_id_again(self, key: int) -> None:
        self.player.submit_again(key=key)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0, 600.0]))
    def pass_time(self, seconds: float) -> None:
        self.player.pass_time(seconds=seconds)

    def teardown(self) -> None:
        if not hasattr(self, "player"):
            return
        self.player.finish()


def test_case_47_whatever_happens_the_laws_hold() -> None:
    """PENSTOCK_MACHINE_RUNS: number of games of a hundred moves, 5,000 for the whole case."""
    num_runs = os.environ.get("PENSTOCK_MACHINE_RUNS")
    how = settings(stateful_step_count=40, max_examples=30)
    if num_runs is not None:
        how = settings(stateful_step_count=100, max_examples=int(num_runs))
    run_state_machine_as_test(EngineMachine, settings=how)
