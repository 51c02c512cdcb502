"""A rolling restart: every front and the engine are followed by new ones, and no request fails.

Owns the order. Fronts share their port, so the next one serves before the last one drains; the
engine ends between two steps, and its requests go on in the next.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.processes.crew import Crew
from penstock.server.processes.engine_place import EnginePlace
from penstock.server.processes.front_place import FrontPlace

log = logging.getLogger(__name__)

_AFTER_GRACE_S = 4.0
"""What a front gets beyond the grace to refuse the last callers and to write the last messages."""


class RollingRestart:
    """Of one service. `fronts`: the list in force, changed here. `grace_s`: see ServerConfig."""

    def __init__(
        self,
        crew: Crew,
        engine: EnginePlace,
        fronts: list[FrontPlace],
        *,
        grace_s: Callable[[], float],
        can_replay: bool,
    ) -> None:
        self._crew = crew
        self._engine = engine
        self._fronts = fronts
        self._grace_s = grace_s
        self._can_replay = can_replay

    async def run(self) -> None:
        """Replace everybody in turn. A front that cannot be followed stays, and all after it."""
        log.info("rolling restart: begun", extra=ALWAYS)
        for place in tuple(self._fronts):
            if not await self._replace(place):
                log.error("rolling restart: broken off, %s stays", place.slot.name)
                return
        if self._can_replay:
            log.info("rolling restart: the engine", extra=ALWAYS)
            await self._engine.restart()
        else:
            log.warning("rolling restart: the engine stays, since no request would outlive it")
        log.info("rolling restart: done", extra=ALWAYS)

    async def _replace(self, old: FrontPlace) -> bool:
        log.info("rolling restart: %s", old.slot.name, extra=ALWAYS)
        new = old.successor()
        keeper = self._crew.join(new.slot)
        # Should it not come up, the old one is still there.
        self._crew.let_go(new.slot)
        ready = asyncio.create_task(new.slot.is_ready.wait())
        try:
            await asyncio.wait({ready, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not new.slot.is_ready.is_set():
            self._crew.forget(new.slot)
            log.error("rolling restart: %s", keeper.exception())
            return False
        self._crew.hold(new.slot)
        self._fronts[self._fronts.index(old)] = new
        await self._retire(old)
        return True

    async def _retire(self, old: FrontPlace) -> None:
        keeper = self._crew.keeper_of(old.slot)
        self._crew.let_go(old.slot)
        grace_s = self._grace_s()
        old.slot.retire(grace_s, is_hand_over=True)
        _, late = await asyncio.wait([keeper], timeout=grace_s + _AFTER_GRACE_S)
        if late:
            log.warning("rolling restart: the old %s did not end in time", old.slot.name)
            old.slot.kill()
            await asyncio.wait([keeper])
        self._crew.forget(old.slot)
        # Whatever it was: it has been followed.
        if not keeper.cancelled() and keeper.exception() is not None:
            log.warning("rolling restart: the old %s: %s", old.slot.name, keeper.exception())
