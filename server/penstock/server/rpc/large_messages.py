"""Queues large messages, so that a small message does not wait for many of them.

Reading 1 MiB blocks the event loop for a few milliseconds, mostly to allocate memory pages.
Messages of at least LARGE_BYTES are handled one at a time, round-robin by caller. After each
message there is a pause as long as its handling took, in which the event loop does other work. The
server accepts one new call per iteration of the event loop, so without pauses a call behind a burst
of large messages would wait for all of them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 64 << 10


class LargeMessageQueue:
    """Permits large messages to be handled one at a time, round-robin by caller, with pauses in
    between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Callers in round-robin order.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_taken = False
        self._began_s = 0.0

    async def acquire(self, caller: str) -> None:
        """Wait until a large message of `caller` may be handled.

        The message must be handled before the task suspends (awaits) again.
        """
        loop = asyncio.get_running_loop()
        permit = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(permit)
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._grant)
        await permit

    def _grant(self) -> None:
        permit = self._next()
        self._is_taken = permit is not None
        if permit is None:
            return
        # The event loop runs these three callbacks in sequence.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        permit.set_result(None)
        loop.call_soon(self._end)

    def _next(self) -> "asyncio.Future[None] | None":
        while self._waiting:
            caller = next(iter(self._waiting))
            queue = self._waiting.pop(caller)
            permit = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # to the end of the order
            if not permit.done():  # its task was not cancelled
                return permit
        return None

    def _begin(self) -> None:
        self._began_s = self._clock()

    def _end(self) -> None:
        took_s = self._clock() - self._began_s
        asyncio.get_running_loop().call_later(took_s, self._grant)
