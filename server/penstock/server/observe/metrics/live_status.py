"""The status page's bytes, fetched from the desk on the event loop by threads that serve HTTP.

Owns the crossing, and how often it happens: however many look, engine and fronts are asked twice
a second at most.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.server.observe.metrics.status_json import status_json
from penstock.server.observe.operations.desk import Desk, DeskError
from penstock.server.observe.operations.snapshot import RequestView

MAX_AGE_S: Final = 0.5
TIMEOUT_S: Final = 5.0


class LiveStatus:
    """Callable from any thread but that of `loop`."""

    def __init__(
        self,
        desk: Desk,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._loop = loop
        self._clock = clock
        self._lock = threading.Lock()
        self._status = b""
        self._as_of_s = float("-inf")

    def __call__(self) -> bytes:
        """The status, MAX_AGE_S old at most. Raises TimeoutError, or RuntimeError at the end."""
        with self._lock:
            if self._clock() - self._as_of_s > MAX_AGE_S:
                asked = self._ask()
                try:
                    future = asyncio.run_coroutine_threadsafe(asked, self._loop)
                except RuntimeError:
                    asked.close()
                    raise
                try:
                    self._status = future.result(TIMEOUT_S)
                except TimeoutError:
                    future.cancel()
                    raise
                self._as_of_s = self._clock()
            return self._status

    async def _ask(self) -> bytes:
        requests: tuple[RequestView, ...] = ()
        problem = ""
        try:
            requests = await self._desk.live_requests()
        except DeskError as error:
            problem = str(error)
        return status_json(self._desk.snapshot(), requests, problem)
