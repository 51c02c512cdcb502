"""The JSON of the status page: a snapshot and the live requests, callable from any thread.

Owns the keys of `/status.json`, which are those of `Snapshot`, and the age limit of a cached
response: for any number of viewers, the service is queried twice a second.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.server.observe.operations.operations import Operations, OperationsError
from penstock.server.observe.operations.snapshot import RequestView, Snapshot

MAX_REQUESTS: Final = 500
"""Most listed requests: the oldest. The total is listed too."""


def status_json(
    snapshot: Snapshot, requests: tuple[RequestView, ...], requests_problem: str = ""
) -> bytes:
    """UTF-8; non-finite numbers are null. `requests_problem`: why live requests are unknown."""
    status = {
        **msgspec.to_builtins(snapshot),
        "requests": requests[:MAX_REQUESTS],
        "num_requests": len(requests),
        "requests_problem": requests_problem,
    }
    # Inside a page, `</script>` would end a script element, so it is escaped.
    return msgspec.json.encode(status).replace(b"<", b"\\u003c")


MAX_AGE_S: Final = 0.5
TIMEOUT_S: Final = 5.0


class LiveStatus:
    """Callable from any thread except that of `loop`."""

    def __init__(
        self,
        operations: Operations,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operations = operations
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
            requests = await self._operations.live_requests()
        except OperationsError as error:
            problem = str(error)
        return status_json(self._operations.snapshot(), requests, problem)
