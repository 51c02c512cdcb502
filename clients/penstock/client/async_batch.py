"""A batch of generations on the asyncio client: a bounded number at a time.

Owns the tasks that read the streams. A new one is made only when the one before has found a
request, so that a short batch has few and a long one never more than its width.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from penstock.client.batch import BatchItem, BatchRequest
from penstock.client.errors import PenstockError
from penstock.client.events import Event

_MAX_HELD_ITEMS = 2


class _Failed:
    """The batch itself cannot go on: a request that does not fit, or a source that broke."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Batch:
    """The tasks of one batch and what they have read."""

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
        # A reader with a full outbox stops reading its stream, and the server sees that.
        self.outbox: asyncio.Queue[BatchItem | _Failed | None] = asyncio.Queue(
            _MAX_HELD_ITEMS * width
        )

    def add_task(self) -> None:
        self._num_reading += 1
        self.tasks.add(asyncio.create_task(self._work()))

    async def _work(self) -> None:
        try:
            while (numbered := await self._next_request()) is not None:
                index, request = numbered
                if len(self.tasks) < self._width:
                    self.add_task()
                await self._read(index, request)
        except Exception as error:
            await self.outbox.put(_Failed(error))
        self._num_reading -= 1
        if not self._num_reading:
            await self.outbox.put(None)

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
                    await self.outbox.put((index, event))
            except PenstockError as error:
                await self.outbox.put((index, error))


async def read_batch(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
    start: Callable[[BatchRequest], AsyncGenerator[Event, None]],
    width: int,
) -> AsyncGenerator[BatchItem, None]:
    """The items of all requests as they come; leaving early cancels what is open."""
    source = _as_async(requests)
    batch = _Batch(source, start, width)
    batch.add_task()
    try:
        while (item := await batch.outbox.get()) is not None:
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        for task in batch.tasks:
            task.cancel()
        await asyncio.wait(batch.tasks)
        await source.aclose()


async def _as_async(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
) -> AsyncGenerator[BatchRequest, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
