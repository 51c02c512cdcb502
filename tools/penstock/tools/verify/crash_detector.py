"""Detects after each check whether the engine has died or was replaced.

If so, waits until an engine serves again, because one crash would otherwise also fail the following
checks.
"""

import asyncio
import time
from collections.abc import Callable

from penstock.client import HealthStatus, ModelState, PenstockError
from penstock.tools.verify.subject import Subject

_POLL_S = 0.2
MAX_RECOVERY_S = 600.0
"""Time limit for a new engine to load its model and serve, seconds."""


class CrashDetector:
    """Detects crashes by the time at which the model became ready, which differs for every engine.
    `is_lost`: no engine served again within the time limit.
    """

    def __init__(
        self, subject: Subject, clock: Callable[[], float] = time.monotonic, poll_s: float = _POLL_S
    ) -> None:
        self._subject = subject
        self._clock = clock
        self._poll_s = poll_s
        self._ready_at_s: float | None = None
        self.is_lost = False

    async def begin(self) -> None:
        """Record the current engine, if there is one."""
        self._ready_at_s = await self._ready_time()

    async def after_check(self, left_s: float) -> str:
        """Return one sentence on what happened to the engine since the last call; "" if it still
        serves, or if no engine served at the last call.

        If the engine of the last call does not serve, waits until one does, for at most `left_s`
        seconds and at most MAX_RECOVERY_S. If none serves by then, sets `is_lost`.
        """
        before_s = self._ready_at_s
        now_s = await self._ready_time()
        if before_s is None or now_s == before_s:
            self._ready_at_s = now_s
            return ""
        started_s = self._clock()
        limit_s = max(0.0, min(left_s, MAX_RECOVERY_S))
        while now_s is None and self._clock() - started_s < limit_s:
            await asyncio.sleep(self._poll_s)
            now_s = await self._ready_time()
        waited_s = self._clock() - started_s
        if now_s is None:
            self.is_lost = True
            return f"the engine died, and no engine served again within {waited_s:.0f} s"
        if now_s == before_s:
            # The same engine: it was unreachable, and lost no state.
            return f"the service did not serve for {waited_s:.1f} s"
        self._ready_at_s = now_s
        return "the engine (or the process before it) died and was replaced"

    async def _ready_time(self) -> float | None:
        """Return when the current engine became ready; None if no engine serves."""
        client = self._subject.client
        try:
            if await client.health() is not HealthStatus.SERVING:
                return None
            model = await client.get_model()
        except PenstockError:
            return None
        return model.ready_at_s if model.state is ModelState.READY else None
