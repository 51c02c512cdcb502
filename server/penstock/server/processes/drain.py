"""Shutdown in order: fronts drain, the engine ends, then the observer.

Owns the order and the time limits. If the engine is restarting, it is waited for as long as a front
has requests for it.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from penstock.server.processes.service_processes import ServiceProcesses
from penstock.server.processes.supervised_process import SupervisedProcess

log = logging.getLogger(__name__)

AFTER_GRACE_S = 1.4
"""Time for fronts to write their last messages after the grace period."""
_ENGINE_EXIT_S = 0.4
"""Minimum time for the engine once the fronts have ended; its executor may ask for more."""
_OBSERVER_EXIT_S = 1.8
"""Time for an observer once all other processes have ended."""
_OBSERVER_TURN_S = 0.5
"""When, after the grace period, an observer gets the order to finish even though processes are
left: its data must be sent in time, and a process that hangs will not send any more.
"""
_LAST_EXIT_S = 1.7
"""When, after the grace period, the observer is killed, so that shutdown ends within two seconds.
"""

Watchers = Mapping[SupervisedProcess, "asyncio.Task[int]"]


async def drain_in_order(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    watchers: Watchers,
    *,
    grace_s: float,
    engine_exit_s: float,
) -> None:
    """End all processes. `engine_exit_s`: time the executor may need to release its resources."""
    fronts = [process for process in processes.all if process is not engine]
    is_lost = processes.has_given_up(engine)
    for front in fronts:
        if is_lost:
            front.send_engine_lost()
        front.retire(grace_s)
    grace_end_s = time.monotonic() + grace_s
    await asyncio.gather(
        _end_engine(processes, engine, fronts, grace_end_s + AFTER_GRACE_S, engine_exit_s),
        _end_watchers(watchers, processes.keepers, grace_end_s),
    )


async def _end_engine(
    processes: ServiceProcesses,
    engine: SupervisedProcess,
    fronts: list[SupervisedProcess],
    limit_s: float,
    engine_exit_s: float,
) -> None:
    """End the engine after the fronts, which have the order already, or after the limit."""
    keeper, waiting = processes.keeper_of(engine), {processes.keeper_of(front) for front in fronts}
    while waiting and (left_s := limit_s - time.monotonic()) > 0:
        watched = waiting if keeper.done() else {*waiting, keeper}
        done, _ = await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        waiting -= done
        if keeper in done and processes.has_given_up(engine):
            for front in fronts:
                front.send_engine_lost()
    if engine.is_ready.is_set():
        engine.retire()
    else:
        # It has no requests. Loading may block in native code for minutes, where it cannot be
        # stopped.
        engine.kill()
    # An executor may need seconds to shut down. It gets the time that the fronts left, or the time
    # that it asks for: nothing is served meanwhile.
    left_s = limit_s + _ENGINE_EXIT_S - time.monotonic()
    await asyncio.wait([keeper], timeout=max(left_s, engine_exit_s))


async def _end_watchers(
    watchers: Watchers, keepers: Iterable["asyncio.Task[int]"], grace_end_s: float
) -> None:
    """End the observers after all other processes, or when the remaining time is what they need."""
    turn_s = grace_end_s + _OBSERVER_TURN_S
    await asyncio.wait(keepers, timeout=max(0.0, turn_s - time.monotonic()))
    for process, watcher in watchers.items():
        left_s = grace_end_s + _LAST_EXIT_S - time.monotonic()
        limit_s = max(0.0, min(_OBSERVER_EXIT_S, left_s))
        process.retire(limit_s)
        _, late = await asyncio.wait([watcher], timeout=limit_s)
        if late:
            log.warning("the %s did not end in time", process.name)
