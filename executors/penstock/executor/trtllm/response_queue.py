"""Passes the engine's responses from the loop's thread to the scheduler's thread.

There is one lock, one wake-up per iteration of the loop for all streams, and one error that ends
the engine. Does not interpret responses.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.executor.trtllm.api import Logprob
from penstock.executor.trtllm.stats import EngineStats
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.scheduler.executor import ExecutorDied

_NUM_TURNS_BEHIND = 3
"""Iterations of the loop by which responses may lag behind an iteration's statistics: the engine
wakes the streams, the streams wake their tasks, and the tasks call `put`.
"""


@dataclass(slots=True, eq=False)
class Response:
    """A response for one engine request: new tokens and, when `is_last`, how the request ended.

    Not frozen, because there is one per request and step, and freezing triples the cost. It is not
    modified after `put`.

    `logprobs`: one entry per token where they were requested. `num_cached`: prompt tokens the
    engine found in its cache, -1 when they were reported before. `failure`: why the request alone
    failed; `is_refusal`: the request is invalid; `is_of_constraint`: its constraint is. `is_own`:
    the response is ours and not the engine's.
    """

    submitted: SubmittedRequest
    tokens: Sequence[int] = ()
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    num_cached: int = -1
    is_last: bool = False
    finish_reason: str = ""
    stop_id: int = -1
    failure: str = ""
    is_refusal: bool = False
    is_of_constraint: bool = False
    is_own: bool = False


class ResponseQueue:
    """Call `put`, `note` and `die` on the loop's thread, the others on the scheduler's.

    Statistics are delivered after all responses that they count, so the two can be compared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Response] = []
        self._ready: list[Response] = []
        self._noted: EngineStats | None = None
        self._stats: EngineStats | None = None
        self._taken_stats: EngineStats | None = None
        self._death: BaseException | None = None
        self._is_told = False
        self._is_closed = False
        self.ready_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, response: Response, loop: asyncio.AbstractEventLoop) -> None:
        """Pass a response on, together with all others of this iteration of the loop."""
        if not self._pending:
            # Runs after every stream that this iteration woke has added its response.
            loop.call_soon(self._flush)
        self._pending.append(response)

    def note(
        self,
        stats: EngineStats,
        loop: asyncio.AbstractEventLoop,
        num_turns: int = _NUM_TURNS_BEHIND,
    ) -> None:
        """Pass statistics on after all earlier responses; wake no thread."""
        if num_turns:
            loop.call_soon(self.note, stats, loop, num_turns - 1)
            return
        self._noted = stats
        loop.call_soon(self._flush)

    def die(self, error: BaseException) -> None:
        """Record that the engine ended; keep the first error."""
        with self._lock:
            self._death = self._death or error
            self._wake()

    def take(self) -> list[Response]:
        """Return all responses since the last call. Raises ExecutorDied if the engine has ended."""
        with self._lock:
            if self._is_closed:
                raise ExecutorDied("the executor is closed")
            if self._is_told:
                self._is_told = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self.ready_fd, 16)
            if self._death is not None:
                raise ExecutorDied(f"the engine died: {self._death!r}") from self._death
            news, self._ready = self._ready, []
            self._taken_stats, self._stats = self._stats or self._taken_stats, None
            return news

    def take_stats(self) -> EngineStats | None:
        """Return, once, the statistics noted before the last `take`."""
        stats, self._taken_stats = self._taken_stats, None
        return stats

    def close(self) -> None:
        """Accept no more responses. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.ready_fd)
                os.close(self._wake_fd)

    def _flush(self) -> None:
        with self._lock:
            self._stats, self._noted = self._noted or self._stats, None
            if self._pending:
                self._ready += self._pending
                self._pending.clear()
                self._wake()

    def _wake(self) -> None:
        if not (self._is_told or self._is_closed):
            self._is_told = True
            os.write(self._wake_fd, b"\0")
