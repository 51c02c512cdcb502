"""The engine over a strict simulated device, for any order of request events.

Arrivals, cancels, faults, deadlines, tenants, priorities, both pipeline depths and tiny pools.
`engine_laws.py` has the invariants, checked after every turn. Hypothesis draws other games in every
run, shrinks a failing one, and prints each of its calls.
"""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from property.engine_machine import EngineMachine


def test_case_47_whatever_happens_the_laws_hold() -> None:
    """PENSTOCK_MACHINE_RUNS: number of games of a hundred moves."""
    num_runs = os.environ.get("PENSTOCK_MACHINE_RUNS")
    how = settings(stateful_step_count=60, max_examples=30)
    if num_runs is not None:
        how = settings(stateful_step_count=100, max_examples=int(num_runs))
    run_state_machine_as_test(EngineMachine, settings=how)
