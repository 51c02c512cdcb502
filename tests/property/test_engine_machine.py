"""The engine over a strict simulated device, for any order of request events.

Requests arrive with deadlines, tenants and priorities, are cancelled, and meet faults of the
device, at both pipeline depths and with few blocks. `engine_invariants.py` contains the invariants,
which are checked after every turn. Hypothesis draws new runs each time, shrinks a failing one, and
prints its calls.
"""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from property.engine_machine import EngineMachine


def test_case_47_invariants_hold_for_any_sequence_of_events() -> None:
    """PENSTOCK_MACHINE_RUNS sets the number of runs of up to 100 calls; default: 12 runs of 60."""
    num_runs = os.environ.get("PENSTOCK_MACHINE_RUNS")
    how = settings(stateful_step_count=60, max_examples=12)
    if num_runs is not None:
        how = settings(stateful_step_count=100, max_examples=int(num_runs))
    run_state_machine_as_test(EngineMachine, settings=how)
