"""Runs a batch of generations on the asyncio client, with a limited number of concurrent requests.

Owns the tasks that read the streams. A task that takes a request starts another task, up to the
maximum number of concurrent requests, so that a short batch has few tasks.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from penstock.client.batch import MAX_HELD_ITEMS, BatchFailed, BatchItem, BatchRequest
from penstock.client.errors import PenstockError
from penstock.client.events import Event


class _Batch:
    """The tasks of one batch, and the items that they have read but `take` has not returned."""

    def __init__(
        self,
        requests: AsyncIterator[BatchRequest],
        start: Callable[[int, BatchRequest], AsyncGenerator[Event, None]],
        width: int,
    ) -> None:
        self._requests = requests
        self._start = start
        self._width = width
        self._source_lock = asyncio.Lock()
        self._num_requests = 0
        self._num_reading = 0
        self._is_exhausted = False
        self.tasks: set[asyncio.Task[None]] = set()
        # A reader that finds the outbox full stops reading its stream, and the server detects that.
        # This is not a bounded queue, because the item that ends the batch must always fit.
        self._free_places = asyncio.Semaphore(MAX_HELD_ITEMS * width)
        self._outbox: asyncio.Queue[BatchItem | BatchFailed | None] = asyncio.Queue()

    def add_task(self) -> None:
        self._num_reading += 1
        self.tasks.add(asyncio.create_task(self._run_worker()))

    async def take(self) -> BatchItem | None:
        """Return the next item; None when all requests have ended. Raises the exception that ended
        the batch early."""
        item = await self._outbox.get()
        if isinstance(item, BatchFailed):
            raise item.error
        self._free_places.release()
        return item

    async def _run_worker(self) -> None:
        try:
            while (numbered := await self._next_request()) is not None:
                index, request = numbered
                if len(self.tasks) < self._width:
                    self.add_task()
                await self._read(index, request)
        except BaseException as error:
            # This includes SystemExit and CancelledError, which a source may raise. The reader of
            # the batch receives them instead of waiting forever.
            self._outbox.put_nowait(BatchFailed(error))
            if _is_being_cancelled():
                raise
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._outbox.put_nowait(None)

    async def _put(self, item: BatchItem) -> None:
        await self._free_places.acquire()
        self._outbox.put_nowait(item)

    async def _next_request(self) -> tuple[int, BatchRequest] | None:
        async with self._source_lock:
            if self._is_exhausted:
                return None
            try:
                request = await anext(self._requests)
            except StopAsyncIteration:
                self._is_exhausted = True
                return None
            index = self._num_requests
            self._num_requests += 1
            return index, request

    async def _read(self, index: int, request: BatchRequest) -> None:
        async with aclosing(self._start(index, request)) as events:
            try:
                async for event in events:
                    await self._put((index, event))
            except PenstockError as error:
                await self._put((index, error))


async def read_batch(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
    start: Callable[[int, BatchRequest], AsyncGenerator[Event, None]],
    width: int,
) -> AsyncGenerator[BatchItem, None]:
    """Yield the events of all requests as they arrive, as (index, event); for a request that fails,
    (index, error) is last.

    `start` returns the events of one request. At most `width` requests are open at a time. Closing
    the generator cancels open requests. An invalid request, or an exception from `requests`, ends
    the batch and is raised.
    """
    source = _as_async(requests)
    batch = _Batch(source, start, width)
    batch.add_task()
    try:
        while (item := await batch.take()) is not None:
            yield item
    finally:
        for task in batch.tasks:
            task.cancel()
        await asyncio.wait(batch.tasks)
        await source.aclose()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _as_async(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
) -> AsyncGenerator[BatchRequest, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
