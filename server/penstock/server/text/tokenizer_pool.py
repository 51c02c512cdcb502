"""Runs work on long texts on threads, shared fairly among tenants.

Decides the order of the work. Work consists of steps of a few milliseconds each; between two steps
of one text, texts of other tenants may run. The tenant with the fewest processed bytes is first
(start-time fair queueing: P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", 1996). The
waiting and running work of a tenant is limited.

Work on a text of more than `_LARGE_BYTES` bytes is large. If up to n > 1 steps may run at a time,
at most n - 1 of them are large, so that small work does not wait for a large step. Large work has
separate threads. Their operating-system priority is lower than the priority of the event loop and
of small work. All accounting is done on the event loop.
"""

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from penstock.server.text.errors import TooMuchText

T = TypeVar("T")
Steps: TypeAlias = Generator[int, None, T]
"""Work in steps. Yields the number of bytes of each step before the step runs, and returns the
result."""

_LARGE_BYTES: Final = 32 << 10
_STEP_BYTES: Final = 1024
"""The fixed cost of a step, in bytes."""
_NICE: Final = 5
_THREAD_NAME: Final = "penstock-tokenizer"
_FIRST_BYTES_PER_S: Final = 1e6
_NEWEST_SHARE: Final = 0.1
_MAX_REMEMBERED: Final = 1024


@dataclass(slots=True, eq=False)
class _Step(Generic[T]):
    """One step and the future of its result. Steps are ordered by their start tag `start`, a
    virtual time in bytes.

    `on_end` is called when the step has ended. It is set only if the work is cancelled while the
    step runs.
    """

    start: float
    num_bytes: int
    is_large: bool
    task: Callable[[], T]
    done: "asyncio.Future[T]"
    is_running: bool = False
    on_end: Callable[[], None] | None = None


class TokenizerPool:
    """The tokenizer's threads, and the queue of the work for them. Call all methods on the same
    event loop.

    `max_bytes_per_tenant` limits the bytes of a tenant's waiting and running texts. A text that
    exceeds it is accepted only if the tenant has no other text here.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        max_bytes_per_tenant: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_threads = num_threads
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._clock = clock
        self._max_large = max(1, num_threads - 1)
        self._small_threads = ThreadPoolExecutor(num_threads, thread_name_prefix=_THREAD_NAME)
        self._large_threads = ThreadPoolExecutor(
            self._max_large, thread_name_prefix=f"{_THREAD_NAME}-large", initializer=_lower_priority
        )
        self._numbers = itertools.count()
        self._small: list[tuple[float, int, _Step[Any]]] = []
        self._large: list[tuple[float, int, _Step[Any]]] = []
        self._num_running = 0
        self._num_large_running = 0
        self._virtual_time = 0.0
        # The finish tag of each tenant's last step.
        self._finish: dict[str, float] = {}
        self._bytes_of: dict[str, int] = {}
        self._bytes_per_s = _FIRST_BYTES_PER_S

    async def run(
        self,
        steps: Steps[T],
        *,
        tenant: str = "",
        num_bytes: int,
        is_bounded: bool = True,
        on_end: Callable[[], None] | None = None,
    ) -> T:
        """Run all steps of work on a text of `num_bytes` bytes, interleaved with other work; return
        its result.

        Raises the exceptions of the work. If `is_bounded`, raises TooMuchText if the tenant has
        other texts here and would exceed the limit with this one. Cancelled work ends after its
        current step, and counts towards the limit until then. `on_end` is called when the work has
        ended, but not after TooMuchText.
        """
        held = self._bytes_of.get(tenant, 0)
        if is_bounded and held and held + num_bytes > self._max_bytes_per_tenant:
            raise TooMuchText(
                max_bytes=self._max_bytes_per_tenant, retry_after_s=held / self._bytes_per_s
            )
        self._bytes_of[tenant] = held + num_bytes
        step: _Step[tuple[bool, Any]] | None = None

        def ended() -> None:
            left = self._bytes_of[tenant] - num_bytes
            if left:
                self._bytes_of[tenant] = left
            else:
                del self._bytes_of[tenant]
            if on_end is not None:
                on_end()

        try:
            is_done, result = _advance(steps)
            while not is_done:
                step = self._queue(steps, tenant, result, is_large=num_bytes > _LARGE_BYTES)
                is_done, result = await step.done
            return cast("T", result)
        finally:
            if step is not None and step.is_running:
                step.on_end = ended
            else:
                ended()

    def close(self) -> None:
        """End the threads and drop waiting work."""
        for threads in (self._small_threads, self._large_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        for _, _, step in (*self._small, *self._large):
            step.done.cancel()
        self._small, self._large = [], []

    def _queue(
        self, steps: Steps[Any], tenant: str, num_bytes: int, *, is_large: bool
    ) -> _Step[tuple[bool, Any]]:
        start = max(self._virtual_time, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + num_bytes + _STEP_BYTES
        done: asyncio.Future[tuple[bool, Any]] = asyncio.get_running_loop().create_future()
        step = _Step(start, num_bytes, is_large, lambda: _advance(steps), done)
        queue = self._large if is_large else self._small
        heapq.heappush(queue, (start, next(self._numbers), step))
        self._start_some()
        return step

    def _start_some(self) -> None:
        while self._num_running < self._num_threads:
            step = self._next()
            if step is None:
                return
            if step.done.done():  # It was cancelled while it waited.
                continue
            self._virtual_time = step.start
            self._forget_some()
            threads = self._large_threads if step.is_large else self._small_threads
            work = threads.submit(step.task)
            self._num_running += 1
            self._num_large_running += step.is_large
            step.is_running = True
            self._watch(step, work)

    def _next(self) -> _Step[Any] | None:
        may_be_large = self._num_large_running < self._max_large
        queues = [queue for queue in (self._small, self._large if may_be_large else []) if queue]
        if not queues:
            return None
        return heapq.heappop(min(queues, key=lambda queue: queue[0][:2]))[2]

    def _watch(self, step: _Step[Any], work: "Future[Any]") -> None:
        loop, started_s = asyncio.get_running_loop(), self._clock()

        def left() -> None:
            self._num_running -= 1
            self._num_large_running -= step.is_large
            step.is_running = False

        def ended() -> None:
            left()
            if step.num_bytes > _STEP_BYTES:
                took_s = max(self._clock() - started_s, 1e-6)
                self._bytes_per_s += _NEWEST_SHARE * (step.num_bytes / took_s - self._bytes_per_s)
            _copy_result(work, step.done)
            if step.on_end is not None:
                step.on_end()
            # Only after the work has queued its next step.
            loop.call_soon(self._start_some)

        def on_thread(_: "Future[Any]") -> None:
            try:
                loop.call_soon_threadsafe(ended)
            except RuntimeError:  # The event loop and its tasks are closed.
                left()

        work.add_done_callback(on_thread)

    def _forget_some(self) -> None:
        """Drop expired finish tags, if there are many.

        A finish tag is the virtual time at which the queued work of a tenant ends. A tenant without
        a tag starts at the current virtual time, and so does a tenant with an expired one.
        """
        if len(self._finish) > _MAX_REMEMBERED:
            now = self._virtual_time
            self._finish = {name: end for name, end in self._finish.items() if end > now}


def in_one_step(task: Callable[[], T], num_bytes: int) -> Steps[T]:
    """Return work with a single step of `num_bytes` bytes. The step calls `task`."""
    yield num_bytes
    return task()


def run_at_once(steps: Steps[T]) -> T:
    """Run all steps on the calling thread and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("T", end.value)


def in_larger_steps(steps: Steps[T], num_bytes: int) -> Steps[T]:
    """Return the same work in larger steps: after the first step, consecutive steps are merged
    until they have at least `num_bytes` bytes."""
    is_first, num_due = True, 0
    while True:
        try:
            num_due += next(steps)
        except StopIteration as end:
            return cast("T", end.value)
        if is_first or num_due >= num_bytes:
            yield num_due
            is_first, num_due = False, 0


def _copy_result(work: "Future[Any]", done: "asyncio.Future[Any]") -> None:
    if done.done():
        return
    if work.cancelled():
        done.cancel()
    elif (error := work.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(work.result())


def _advance(steps: Steps[Any]) -> tuple[bool, Any]:
    """Run the next step. Returns True if the work has ended, and the value that it yielded or
    returned.

    StopIteration is caught here, because a future cannot hold it.
    """
    try:
        return False, next(steps)
    except StopIteration as end:
        return True, end.value


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):
        thread_id = threading.get_native_id()
        os.setpriority(
            os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + _NICE
        )
