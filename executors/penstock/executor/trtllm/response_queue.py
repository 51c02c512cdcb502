"""Passes the engine's responses from the event loop's thread to the scheduler's thread.

Takes the lock and wakes the scheduler's thread once per event loop iteration, for the responses of
all requests together.
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
"""Event loop iterations by which the responses of an engine iteration may arrive after its
statistics: the engine wakes the result objects, these wake the tasks that read them, and the tasks
call `put`.
"""


@dataclass(slots=True, eq=False)
class Response:
    """A response for one engine request: new tokens and, when `is_last`, how the request ended.

    Must not be modified after `put`. Not frozen, because one is created per request and step, and a
    frozen dataclass takes longer to create.

    Attributes:
        logprobs: One entry per token, a map of token ids to log probabilities; None if they were
            not requested.
        num_cached: Prompt tokens that the engine found in its cache; -1 except in the request's
            first response.
        failure: Why this request failed; empty if it did not.
        is_rejected: Whether it failed because the request is invalid.
        is_constraint_error: Whether it failed because its constraint is invalid.
        finish_reason: Why the sequence ended, such as "stop" or "length"; empty if the engine gave
            no reason.
        stop_id: The stop token id that ended the sequence; -1 if none did.
        is_synthetic: Whether the response was created by this executor, not by the engine.
    """

    submitted: SubmittedRequest
    tokens: Sequence[int] = ()
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    num_cached: int = -1
    is_last: bool = False
    finish_reason: str = ""
    stop_id: int = -1
    failure: str = ""
    is_rejected: bool = False
    is_constraint_error: bool = False
    is_synthetic: bool = False


class ResponseQueue:
    """Passes responses between two threads. Call `put` and `put_stats` on the event loop's thread,
    `fail` on any thread, the other methods on the scheduler's thread.

    Statistics of an engine iteration are delivered after the responses of that iteration, so the
    two can be compared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Response] = []
        self._ready: list[Response] = []
        self._queued_stats: EngineStats | None = None
        self._stats: EngineStats | None = None
        self._taken_stats: EngineStats | None = None
        self._engine_error: BaseException | None = None
        self._is_notified = False
        self._is_closed = False
        self.ready_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, response: Response, loop: asyncio.AbstractEventLoop) -> None:
        """Queue a response, for delivery with the others of this event loop iteration."""
        if not self._pending:
            # Runs after all streams that were woken in this iteration have added their responses.
            loop.call_soon(self._flush)
        self._pending.append(response)

    def put_stats(
        self,
        stats: EngineStats,
        loop: asyncio.AbstractEventLoop,
        num_turns: int = _NUM_TURNS_BEHIND,
    ) -> None:
        """Queue statistics for delivery after `num_turns` more event loop iterations, when the
        responses of the same engine iteration have arrived. Does not wake the scheduler's thread.
        """
        if num_turns:
            loop.call_soon(self.put_stats, stats, loop, num_turns - 1)
            return
        self._queued_stats = stats
        loop.call_soon(self._flush)

    def fail(self, error: BaseException) -> None:
        """Record that the engine ended with this error, unless one is recorded already, and wake
        the scheduler's thread.
        """
        with self._lock:
            self._engine_error = self._engine_error or error
            self._wake()

    def take(self) -> list[Response]:
        """Return all responses since the last call. Raises ExecutorDied if the engine has ended or
        after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise ExecutorDied("the executor is closed")
            if self._is_notified:
                self._is_notified = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self.ready_fd, 16)
            if self._engine_error is not None:
                raise ExecutorDied(
                    f"the engine died: {self._engine_error!r}"
                ) from self._engine_error
            updates, self._ready = self._ready, []
            self._taken_stats, self._stats = self._stats or self._taken_stats, None
            return updates

    def take_stats(self) -> EngineStats | None:
        """Return the latest statistics delivered before the last `take`; None if there are none or
        they were returned already.
        """
        stats, self._taken_stats = self._taken_stats, None
        return stats

    def close(self) -> None:
        """Close the descriptors; `take` then raises ExecutorDied. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.ready_fd)
                os.close(self._wake_fd)

    def _flush(self) -> None:
        with self._lock:
            self._stats, self._queued_stats = self._queued_stats or self._stats, None
            if self._pending:
                self._ready += self._pending
                self._pending.clear()
                self._wake()

    def _wake(self) -> None:
        if not (self._is_notified or self._is_closed):
            self._is_notified = True
            os.write(self._wake_fd, b"\0")
