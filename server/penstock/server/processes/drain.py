"""The end of a service in order: fronts finish what they have, the engine ends, then the observer.

Owns the order and the times. An engine that starts meanwhile is waited for as long as a front has
requests for it: these may be waiting for just that.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from penstock.server.processes.crew import Crew
from penstock.server.processes.slot import Slot

log = logging.getLogger(__name__)

AFTER_GRACE_S = 1.4
"""What fronts get beyond the grace to write their last messages."""
_ENGINE_EXIT_S = 0.4
"""What an engine has at least, once the fronts have ended; its executor may ask for more."""
_OBSERVER_EXIT_S = 1.8
"""What an observer has once all others have ended: it needs no more, and nobody waits longer."""
_OBSERVER_TURN_S = 0.5
"""When, after the grace, an observer is told to finish whoever else still has not ended: what it
holds must leave before all is over, and who hangs has nothing more to tell it."""
_LAST_EXIT_S = 1.7
"""When, after the grace, an observer that still has not ended is killed: all is over after two
seconds."""

Watchers = Mapping[Slot, "asyncio.Task[int]"]


async def drain_in_order(
    crew: Crew, engine: Slot, watchers: Watchers, *, grace_s: float, engine_exit_s: float
) -> None:
    """End everybody. `engine_exit_s`: what the executor may take to give everything back."""
    fronts = [slot for slot in crew.slots if slot is not engine]
    is_lost = crew.has_given_up(engine)
    for front in fronts:
        if is_lost:
            front.tell_engine_lost()
        front.retire(grace_s)
    grace_end_s = time.monotonic() + grace_s
    await asyncio.gather(
        _end_engine(crew, engine, fronts, grace_end_s + AFTER_GRACE_S, engine_exit_s),
        _end_watchers(watchers, crew.keepers, grace_end_s),
    )


async def _end_engine(
    crew: Crew, engine: Slot, fronts: list[Slot], limit_s: float, engine_exit_s: float
) -> None:
    """Once the fronts, that have been told, have ended, or are too late."""
    keeper, waiting = crew.keeper_of(engine), {crew.keeper_of(front) for front in fronts}
    while waiting and (left_s := limit_s - time.monotonic()) > 0:
        watched = waiting if keeper.done() else {*waiting, keeper}
        done, _ = await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        if keeper in done and crew.has_given_up(engine):
            for front in fronts:
                front.tell_engine_lost()
    if engine.is_ready.is_set():
        engine.retire()
    else:
        # It carries nothing. A load may sit in foreign code for minutes, deaf to orders.
        engine.kill()
    # An executor may need seconds to take itself down: it has what the fronts left, and what it
    # asks for, since nothing is served meanwhile.
    left_s = limit_s + _ENGINE_EXIT_S - time.monotonic()
    await asyncio.wait([keeper], timeout=max(left_s, engine_exit_s))


async def _end_watchers(
    watchers: Watchers, keepers: Iterable["asyncio.Task[int]"], grace_end_s: float
) -> None:
    """After all that they watch, or when the rest of their time is what they need."""
    turn_s = grace_end_s + _OBSERVER_TURN_S
    await asyncio.wait(keepers, timeout=max(0.0, turn_s - time.monotonic()))
    for slot, watcher in watchers.items():
        left_s = grace_end_s + _LAST_EXIT_S - time.monotonic()
        limit_s = max(0.0, min(_OBSERVER_EXIT_S, left_s))
        slot.retire(limit_s)
        _, late = await asyncio.wait([watcher], timeout=limit_s)
        if late:
            log.warning("the %s did not end in time", slot.name)
