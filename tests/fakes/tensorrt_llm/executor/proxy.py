"""The caller's side of the engine: ids, results, background errors, shutdown."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.response import Response
from tensorrt_llm.executor.async_queue import AsyncQueue, EventLoopShutdownError
from tensorrt_llm.executor.errors import CppExecutorError, RequestError
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.executor.result import IterationResult, RequestOutput
from tensorrt_llm.executor.stats_dispatch import StatsDispatch
from tensorrt_llm.executor.worker_process import WorkerProcess
from tensorrt_llm.fake_control import Settings
from tensorrt_llm.llmapi.limits import EngineLimits
from tensorrt_llm.llmapi.tokenizer import TokenizerBase

MAX_REMEMBERED = 20_000


class GenerationExecutorProxy:
    """Submits, dispatches responses, and shuts down."""

    def __init__(
        self, limits: EngineLimits, settings: Settings, tokenizer: TokenizerBase | None
    ) -> None:
        self.submitted: deque[GenerationRequest] = deque(maxlen=MAX_REMEMBERED)
        self.aborted: deque[int] = deque(maxlen=MAX_REMEMBERED)
        self.shutdown_threads: list[str] = []
        self._limits = limits
        self._settings = settings
        self._tokenizer = tokenizer
        self._ids = itertools.count(1)
        self._results: dict[int, RequestOutput] = {}
        self._errors: deque[BaseException] = deque()
        self._unraised: deque[BaseException] = deque()
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False
        self._stats: IterationResult | None = None
        self.slip_token = settings.slip_token
        self._stats_dispatch = StatsDispatch(settings)
        # Exists only where statistics are fetched.
        self.rpc_client = None if settings.stats == "push" else self._stats_dispatch
        self.engine = PyExecutor(limits, settings, self._dispatch, self._stats_dispatch.put)
        self._worker = (
            WorkerProcess(settings, self._lose_worker) if settings.worker_process else None
        )

    @property
    def num_results(self) -> int:
        """Number of results that wait for a response."""
        return len(self._results)

    @property
    def num_unread_stats(self) -> int:
        """Number of statistics that are not yet read."""
        if self._stats is None:
            return 0
        waiting = self._stats.queue
        num_pushed = len(waiting) if isinstance(waiting, AsyncQueue) else waiting.qsize()
        return num_pushed if self.rpc_client is None else self.rpc_client.num_kept

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    def submit(self, request: GenerationRequest, prompt: str | None) -> RequestOutput:
        """Submit a request; return at once, whatever the engine's load."""
        if self._stats is None:
            self._stats = IterationResult()
            self._stats_dispatch.start(self._stats)
        self._stats.mark_undone()
        request.id = next(self._ids)
        result = RequestOutput(
            request, self, self._handle_background_error, self._tokenizer, prompt
        )
        self._results[request.id] = result
        self.submitted.append(request)
        if not self.engine.is_alive and not self._errors:
            self._errors.append(CppExecutorError("the engine loop is dead"))
        self.engine.put(request)
        self._handle_background_error(None)
        return result

    def abort_request(self, request_id: int) -> None:
        """Ask the engine to end a request; an unknown request gets no response."""
        self.aborted.append(request_id)
        self.engine.put(request_id)

    def stats(self, timeout: float | None) -> IterationResult | None:
        """Return the only `IterationResult`; None before the first submission."""
        if self._stats is None:
            print(
                "Iteration statistics are only there after the first generate_async",
                file=sys.stderr,
            )
            return None
        self._stats.set_timeout(timeout)
        if self.rpc_client is not None:
            # On the caller's thread; nothing fills the queue after this.
            for each in self.rpc_client.fetch(timeout):
                self._stats.add(each)
        return self._stats

    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return statistics for callers without a loop."""
        if self.rpc_client is not None:
            return self.rpc_client.fetch(timeout)
        result = self.stats(timeout)
        return [] if result is None else result.get_results()

    def is_shutdown(self) -> bool:
        """Return what `_check_health` sees: it may miss that the loop has died by itself."""
        if self._is_shut_down:
            return True
        return self._settings.is_death_seen_by_health and not self.engine.is_alive

    def shutdown(self) -> None:
        """Stop everything; blocks, and does nothing the second time.

        Raises at the end a previous error that was not yet raised.
        """
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        self.shutdown_threads.append(threading.current_thread().name)
        if self._settings.shutdown_s > 0.0:
            self.engine.released.wait(self._settings.shutdown_s)
        self.engine.stop()
        self._stats_dispatch.stop()
        if self._worker is not None:
            self._worker.stop()
        if self._unraised:
            raise self._unraised.popleft()

    def _handle_background_error(self, error: str | BaseException | None) -> None:
        """Raise the error: RequestError unchanged, any other after a shutdown."""
        if isinstance(error, str):
            raise RequestError(error)
        if error is None and self._errors:
            error = self._errors[0]
        if isinstance(error, BaseException) and error in self._unraised:
            self._unraised.remove(error)
        if error is not None:
            if not isinstance(error, RequestError):
                self.shutdown()
            raise error

    def _lose_worker(self) -> None:
        """Stop the engine after the worker process has died."""
        if not self._is_shut_down:
            if self._settings.is_worker_death_fatal:
                self.engine.strike("fatal")
            else:
                self.engine.strike("kill")

    def _dispatch(self, responses: list[Response]) -> None:
        """Fill every queue, then wake one loop: the loop of the first response."""
        loop = None
        filled: list[AsyncQueue[Response]] = []
        for response in responses:
            if isinstance(response.error, BaseException):
                self._errors.append(response.error)
                self._unraised.append(response.error)
            result = self._results.get(response.client_id)
            if result is None:
                continue
            if isinstance(result.queue, AsyncQueue):
                result.queue.put_nowait(response)
                filled.append(result.queue)
                loop = loop or result.queue.loop
            else:
                result.queue.put(response)
            if response.is_final:
                del self._results[response.client_id]
        if loop is not None:
            try:
                AsyncQueue.notify_many(loop, filled)
            except EventLoopShutdownError:
                print("proxy.py: EventLoopShutdownError", file=sys.stderr)


async def empty_async_iterable() -> AsyncIterator[dict[str, Any]]:
    """Yield nothing."""
    nothing: tuple[dict[str, Any], ...] = ()
    for each in nothing:
        yield each
