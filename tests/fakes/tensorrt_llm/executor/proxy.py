"""The caller's side of the engine, which passes results, statistics and errors to the caller."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.llm_request import Response
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.executor.async_queue import AsyncQueue
from tensorrt_llm.executor.request import CppExecutorError, GenerationRequest, RequestError
from tensorrt_llm.executor.result import IterationResult, RequestOutput
from tensorrt_llm.executor.worker_process import WorkerProcess
from tensorrt_llm.fake_control import Settings

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm import EngineLimits

MAX_REMEMBERED = 20_000


class GenerationExecutorProxy:
    """Submits requests, passes responses to their results, and shuts the engine down."""

    def __init__(self, limits: EngineLimits, settings: Settings) -> None:
        self.submitted: deque[GenerationRequest] = deque(maxlen=MAX_REMEMBERED)
        self.aborted: deque[int] = deque(maxlen=MAX_REMEMBERED)
        self.shutdown_threads: list[str] = []
        self.settings = settings
        self._ids = itertools.count(1)
        self._results: dict[int, RequestOutput] = {}
        self._errors: deque[BaseException] = deque()
        self._unraised: deque[BaseException] = deque()
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False
        self.stats: IterationResult | None = None
        """One object for all readers; None before the first submission."""
        # Exists only where statistics are fetched.
        self.rpc_client: SimpleQueue[dict[str, Any]] | None = (
            None if settings.stats == "push" else SimpleQueue()
        )
        self.engine = PyExecutor(limits, settings, self._dispatch, self._report)
        self._worker = (
            WorkerProcess(settings.worker_lifetime_s, self._lose_worker)
            if settings.worker_process
            else None
        )

    @property
    def num_results(self) -> int:
        """Number of requests whose final response has not arrived."""
        return len(self._results)

    @property
    def num_unread_stats(self) -> int:
        if self.rpc_client is not None:
            return self.rpc_client.qsize()
        return 0 if self.stats is None else len(self.stats.queue)

    def submit(self, request: GenerationRequest) -> RequestOutput:
        """Submit a request; return at once, even if the engine is overloaded."""
        if self.stats is None:
            self.stats = IterationResult()
        self.stats.mark_undone()
        request.id = next(self._ids)
        result = RequestOutput(request, self)
        self._results[request.id] = result
        self.submitted.append(request)
        if not self.engine.is_alive and not self._errors:
            self._errors.append(CppExecutorError("the engine loop is dead"))
        self.engine.put(request)
        self.raise_error(None)
        return result

    def abort_request(self, request_id: int) -> None:
        """Ask the engine to end a request; an unknown request gets no response."""
        self.aborted.append(request_id)
        self.engine.put(request_id)

    def is_shutdown(self) -> bool:
        """Return whether the engine was shut down or, if `is_death_seen_by_health` is set, its loop
        has ended.
        """
        if self._is_shut_down:
            return True
        return self.settings.is_death_seen_by_health and not self.engine.is_alive

    def shutdown(self) -> None:
        """Stop the engine and its worker process. Blocks for up to `shutdown_s`, and then until
        both have ended, at most 10 s for each; a second call does nothing.

        Finally raises the oldest error of the engine that was not raised yet, if there is one.
        """
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        self.shutdown_threads.append(threading.current_thread().name)
        if self.settings.shutdown_s > 0.0:
            self.engine.released.wait(self.settings.shutdown_s)
        self.engine.stop()
        if self._worker is not None:
            self._worker.stop()
        if self._unraised:
            raise self._unraised.popleft()

    def raise_error(self, error: str | BaseException | None) -> None:
        """Raise RequestError for the error of a request; for an error of the engine, shut down and
        raise it.

        None: raise the engine's first error, if there is one.
        """
        if isinstance(error, str):
            raise RequestError(error)
        if error is None and self._errors:
            error = self._errors[0]
        if error is None:
            return
        if error in self._unraised:
            self._unraised.remove(error)
        self.shutdown()
        raise error

    def _lose_worker(self) -> None:
        """Stop the engine after the worker process has died."""
        if not self._is_shut_down:
            self.engine.inject("fatal" if self.settings.is_worker_death_fatal else "kill")

    def _report(self, stats: dict[str, Any]) -> None:
        if self.rpc_client is not None:
            self.rpc_client.put(stats)
        elif self.stats is not None:
            self.stats.queue.put_nowait(stats)
            AsyncQueue.notify_many(self.stats.queue.loop, [self.stats.queue])

    def _dispatch(self, responses: list[Response]) -> None:
        """Put all responses into their queues, then set all events on the event loop of the first
        response.
        """
        filled: list[AsyncQueue[Response]] = []
        for response in responses:
            if isinstance(response.error, BaseException):
                self._errors.append(response.error)
                self._unraised.append(response.error)
            result = self._results.get(response.client_id)
            if result is None:
                continue
            result.queue.put_nowait(response)
            filled.append(result.queue)
            if response.is_final:
                del self._results[response.client_id]
        if filled:
            AsyncQueue.notify_many(filled[0].loop, filled)
