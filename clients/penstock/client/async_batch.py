"""Runs a batch of generations on the asyncio client, a bounded number concurrently.

Owns the tasks that read the streams. A task starts only when the previous one has taken a request,
so that a short batch has few tasks and a long one at most its width.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from penstock.client.batch import BatchItem, BatchRequest
from penstock.client.errors import PenstockError
from penstock.client.events import Event

_MAX_HELD_ITEMS = 2


class _Failed:
    """The batch cannot continue: an invalid request, or a failed source."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Batch:
    """The tasks of one batch and the items that they have read."""

    def __init__(
        self,
        requests: AsyncIterator[BatchRequest],
        start: Callable[[BatchRequest], AsyncGenerator[Event, None]],
        width: int,
    ) -> None:
        self._requests = requests
        self._start = start
        self._width = width
        self._turn = asyncio.Lock()
        self._num_requests = 0
        self._num_reading = 0
        self._is_exhausted = False
        self.tasks: set[asyncio.Task[None]] = set()
        # A reader without room in the outbox stops reading its stream, and the server sees that.
        # Instead of a bounded queue: the end item always has room.
        self._room = asyncio.Semaphore(_MAX_HELD_ITEMS * width)
        self._outbox: asyncio.Queue[BatchItem | _Failed | None] = asyncio.Queue()

    def add_task(self) -> None:
        self._num_reading += 1
        self.tasks.add(asyncio.create_task(self._work()))

    async def take(self) -> BatchItem | None:
        """Return the next item, None at the end. Raises the error that ended the batch."""
        item = await self._outbox.get()
        if isinstance(item, _Failed):
            raise item.error
        self._room.release()
        return item

    async def _work(self) -> None:
        try:
            while (numbered := await self._next_request()) is not None:
                index, request = numbered
                if len(self.tasks) < self._width:
                    self.add_task()
                await self._read(index, request)
        except BaseException as error:
            # SystemExit and CancelledError too, which a source may raise: the reader of the batch
            # receives them instead of waiting forever.
            self._outbox.put_nowait(_Failed(error))
            if _is_being_cancelled():
                raise
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._outbox.put_nowait(None)

    async def _put(self, item: BatchItem) -> None:
        await self._room.acquire()
        self._outbox.put_nowait(item)

    async def _next_request(self) -> tuple[int, BatchRequest] | None:
        async with self._turn:
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
        async with aclosing(self._start(request)) as events:
            try:
                async for event in events:
                    await self._put((index, event))
            except PenstockError as error:
                await self._put((index, error))


async def read_batch(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
    start: Callable[[BatchRequest], AsyncGenerator[Event, None]],
    width: int,
) -> AsyncGenerator[BatchItem, None]:
    """Yield the items of all requests as they arrive; leaving early cancels open requests."""
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
