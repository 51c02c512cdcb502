"""Performs a rolling restart: replaces all fronts (gRPC server processes) and the engine while the
service accepts requests.

Defines the order of the replacements. Fronts share their port, so the new front serves before the
old one drains. The engine ends between two steps, and its requests continue in the next engine.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.engine_supervision import EngineSupervision
from penstock.server.processes.front_supervision import FrontSupervision
from penstock.server.processes.service_processes import ServiceProcesses

logger = logging.getLogger(__name__)

_AFTER_DRAIN_S = 4.0
"""Time for a front, after the drain timeout, to reject the last calls and to write the last
messages, in seconds."""


class RollingRestart:
    """Restarts the fronts and the engine of one service. `fronts` is the supervisor's list of
    fronts; each entry is replaced by its successor.

    `drain_timeout_s` returns the time for each front's drain, in seconds. The engine is restarted
    only if `can_replay`.
    """

    def __init__(
        self,
        processes: ServiceProcesses,
        engine: EngineSupervision,
        fronts: list[FrontSupervision],
        *,
        drain_timeout_s: Callable[[], float],
        can_replay: bool,
    ) -> None:
        self._processes = processes
        self._engine = engine
        self._fronts = fronts
        self._drain_timeout_s = drain_timeout_s
        self._can_replay = can_replay

    async def run(self) -> None:
        """Replace the fronts one by one, then the engine. Stops at a front whose successor does not
        start."""
        logger.info("rolling restart: started", extra=ALWAYS)
        for place in tuple(self._fronts):
            if not await self._replace(place):
                logger.error("rolling restart: stopped, %s was not replaced", place.process.name)
                return
        if self._can_replay:
            logger.info("rolling restart: replacing the engine", extra=ALWAYS)
            await self._engine.restart()
        else:
            logger.warning(
                "rolling restart: the engine is not replaced: without replays its requests fail"
            )
        logger.info("rolling restart: done", extra=ALWAYS)

    async def _replace(self, old: FrontSupervision) -> bool:
        logger.info("rolling restart: replacing %s", old.process.name, extra=ALWAYS)
        new = old.successor()
        task = self._processes.add(new.process)
        # If it does not start, the old front continues to serve.
        self._processes.expect_exit(new.process)
        ready = asyncio.create_task(new.process.is_ready.wait())
        try:
            await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not new.process.is_ready.is_set():
            self._processes.remove(new.process)
            logger.error("rolling restart: %s", task.exception())
            return False
        self._processes.require(new.process)
        self._fronts[self._fronts.index(old)] = new
        await self._retire(old)
        return True

    async def _retire(self, old: FrontSupervision) -> None:
        task = self._processes.task_of(old.process)
        self._processes.expect_exit(old.process)
        drain_timeout_s = self._drain_timeout_s()
        old.process.retire(drain_timeout_s, has_successor=True)
        _, late = await asyncio.wait([task], timeout=drain_timeout_s + _AFTER_DRAIN_S)
        if late:
            logger.warning("rolling restart: the old %s did not end in time", old.process.name)
            old.process.kill()
            await asyncio.wait([task])
        self._processes.remove(old.process)
        # A failure here is harmless, because the process has been replaced.
        if not task.cancelled() and task.exception() is not None:
            logger.warning("rolling restart: the old %s: %s", old.process.name, task.exception())
