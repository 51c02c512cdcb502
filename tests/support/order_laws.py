"""Who may be let in and preempted before whom, judged by what a turn reported.

Owns the rules of both orders as a client would state them. The bounds of passing are watched by
`order_witness`, shares of tenants by the tests of fairness.
"""

from __future__ import annotations

import math

from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.events import Admitted, Preempted, StepEvents
from support.game_records import Game, Told


def check_order(game: Game, events: StepEvents) -> None:
    """Seniority (FCFS) or classes (FAIR), and who is new in a step that preempted.

    To be asked before the events are taken.
    """
    preempted = {change.key for change in events.changes if isinstance(change, Preempted)}
    admitted = {change.key for change in events.changes if isinstance(change, Admitted)}
    if not (preempted or admitted):
        return
    # Under the other policy who is in stays in.
    assert not preempted or game.config.admission_policy is AdmissionPolicy.MAX_UTILIZATION
    if preempted and admitted:
        _check_yields(game, events)
    ended = {end.key for end in events.ends}
    live = {key: told for key, told in game.live.items() if key not in ended}
    running = {key for key, told in live.items() if told.is_running}
    _check_forms(live, running, preempted)
    if game.config.order is SchedulingOrder.FCFS:
        _check_seniority(game, events, live, running, preempted)
    else:
        _check_victims(game, live, running, preempted, admitted)
        _check_classes(game, live, admitted)
        _check_lines(game, live, running, admitted)


def _check_yields(game: Game, events: StepEvents) -> None:
    """No client new in a step that preempted, but for those of a tenant that others yield to.

    These are of no lower class than a caller that was preempted before them.
    """
    assert game.config.order is SchedulingOrder.FAIR
    assert math.isfinite(game.config.yield_ratio)
    levels: list[int] = []
    for change in events.changes:
        if isinstance(change, Preempted):
            levels.append(game.told[change.key].level)
        elif isinstance(change, Admitted):
            assert _level(game, game.told[change.key]) >= max(levels, default=-math.inf)


def _level(game: Game, told: Told) -> float:
    """The class to which a request has risen by now, at most."""
    return told.spec.priority + (game.clock() - told.spec.arrival_s) / game.config.aging_s


def _check_forms(live: dict[int, Told], running: set[int], preempted: set[int]) -> None:
    """Whose output has a form is preempted only when no client else is left."""
    if any(live[key].spec.constraint is not None for key in preempted & live.keys()):
        assert all(live[key].spec.constraint is not None for key in running - preempted)


def _check_seniority(
    game: Game,
    events: StepEvents,
    live: dict[int, Told],
    running: set[int],
    preempted: set[int],
) -> None:
    """No client is admitted before a senior who may run, nor preempted before a junior."""
    for change in events.changes:
        told = game.told[change.key]
        if isinstance(change, Preempted):
            if told.spec.constraint is None:
                others = (live[key] for key in running - preempted)
                assert all(o.rank < told.rank for o in others if o.spec.constraint is None)
        elif isinstance(change, Admitted):
            # Outputs after the first may wait for their leader.
            waiting = [other for key, other in live.items() if key not in running]
            assert all(o.rank >= told.rank for o in waiting if not o.spec.leader_key)
            running.add(change.key)


def _check_victims(
    game: Game, live: dict[int, Told], running: set[int], preempted: set[int], admitted: set[int]
) -> None:
    """No client is preempted while a client of a lower class runs on, unless to yield.

    Who yields does so to a client of another tenant and of no lower class.
    """
    left = [live[key] for key in running - preempted]
    favoured = [game.told[key] for key in admitted]
    for told in (live[key] for key in preempted & live.keys()):
        if told.spec.constraint is not None:
            continue
        is_yielding = math.isfinite(game.config.yield_ratio) and any(
            one.spec.tenant != told.spec.tenant and _level(game, one) >= told.level
            for one in favoured
        )
        is_lowest = all(told.level <= o.level for o in left if o.spec.constraint is None)
        assert is_lowest or is_yielding


def _check_classes(game: Game, live: dict[int, Told], admitted: set[int]) -> None:
    """Classes as they stand at admission: the priority, and one more for each `aging_s` waited."""
    for key in admitted & game.engine.requests.keys() & live.keys():
        told, slot = live[key], game.engine.requests[key].slot
        told.level = int(game.engine.arrays.level[slot])
        assert told.spec.priority <= told.level <= _level(game, told)


def _check_lines(game: Game, live: dict[int, Told], running: set[int], admitted: set[int]) -> None:
    """Whom a preemption threw out stands before the fresh of its class and tenant."""
    thrown_out = [
        told
        for key, told in live.items()
        if told.num_preemptions and key not in running and key not in admitted
    ]
    lines = {told.line for told in thrown_out}
    for told in (live[key] for key in admitted & live.keys()):
        assert told.num_preemptions or told.line not in lines
