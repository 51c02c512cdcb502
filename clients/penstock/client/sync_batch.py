"""Runs a batch of generations on the blocking client, with a limited number of concurrent requests.

Owns the threads that read the streams. A thread that takes a request starts another thread, up to
the maximum number of concurrent requests, so that a short batch has few threads.
"""

import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import closing

from penstock.client.batch import MAX_HELD_ITEMS, BatchFailed, BatchItem, BatchRequest
from penstock.client.errors import PenstockError
from penstock.client.local_errors import request_cancelled
from penstock.client.runtime import StartStream, Stream
from penstock.client.without_loop import iterate

_CLOSE_TIMEOUT_S = 2.0
"""Maximum wait for open streams when a batch is closed early, in seconds.

A stream that waits before its next attempt cannot be interrupted.
"""


class _Cancellation:
    """Lets another thread end a stream that is being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Stream | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the stream, now or when it begins. Its reader raises CallCancelled."""
        with self._lock:
            self.is_cancelled = True
            call = self._call
        if call is not None:
            call.cancel()

    def watch(self, call: Stream) -> None:
        """Set the call that `cancel` ends from now on.

        Raises CallCancelled if the stream was already cancelled.
        """
        with self._lock:
            self._call = call
            is_cancelled = self.is_cancelled
        if is_cancelled:
            raise request_cancelled("")


class _Outbox:
    """A bounded queue of items that were read from streams. Until it is closed, `put` blocks while
    it is full."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[BatchItem | BatchFailed | None] = deque()
        self._is_closed = False
        lock = threading.Lock()
        self._not_full = threading.Condition(lock)
        self._not_empty = threading.Condition(lock)

    def put(self, item: BatchItem) -> None:
        with self._not_full:
            self._not_full.wait_for(lambda: len(self._items) < self._max_items or self._is_closed)
            self._items.append(item)
            self._not_empty.notify()

    def put_end(self, end: BatchFailed | None) -> None:
        """Add the item that ends the batch: None if all requests have ended. Never blocks."""
        with self._not_empty:
            self._items.append(end)
            self._not_empty.notify()

    def get(self) -> BatchItem | BatchFailed | None:
        with self._not_empty:
            self._not_empty.wait_for(lambda: self._items)
            self._not_full.notify()
            return self._items.popleft()

    def close(self) -> None:
        with self._not_full:
            self._is_closed = True
            self._not_full.notify_all()


class _Batch:
    """One batch: its threads, their streams, and the items that they have read."""

    def __init__(self, requests: Iterator[BatchRequest], start: StartStream, width: int) -> None:
        self._requests = requests
        self._start = start
        self._width = width
        self._lock = threading.Lock()
        self._has_closed_stream = threading.Condition(self._lock)
        # This is a separate lock, because a source that blocks a thread must not block `cancel`.
        self._source_lock = threading.Lock()
        self._num_requests = 0
        self._num_threads = 0
        self._num_reading = 0
        self._is_over = False
        self._is_cancelled = False
        self._open: set[_Cancellation] = set()
        # A reader that finds the outbox full stops reading its stream, and the server detects that.
        self.outbox = _Outbox(MAX_HELD_ITEMS * width)

    def add_thread(self) -> None:
        with self._lock:
            if self._is_over or self._num_threads >= self._width:
                return
            self._num_threads += 1
            self._num_reading += 1
        threading.Thread(target=self._run_worker, name="penstock-batch", daemon=True).start()

    def cancel(self) -> None:
        """Take no more requests and cancel the streams, which ends their threads."""
        with self._lock:
            self._is_over = self._is_cancelled = True
            cancellations = tuple(self._open)
        for cancellation in cancellations:
            cancellation.cancel()
        self.outbox.close()

    def wait_until_closed(self) -> None:
        """Wait until no stream is open, at most `_CLOSE_TIMEOUT_S` seconds.

        A thread that waits for the next request of the batch is ignored.
        """
        with self._has_closed_stream:
            self._has_closed_stream.wait_for(lambda: not self._open, _CLOSE_TIMEOUT_S)

    def _run_worker(self) -> None:
        try:
            while (taken := self._next_request()) is not None:
                self.add_thread()
                self._read(*taken)
        except BaseException as error:
            # This includes SystemExit, which a source may raise. The reader of the batch receives
            # it instead of waiting forever.
            self.outbox.put_end(BatchFailed(error))
        finally:
            with self._lock:
                self._num_reading -= 1
                is_last = not self._num_reading
            if is_last:
                self.outbox.put_end(None)

    def _next_request(self) -> tuple[int, BatchRequest, _Cancellation] | None:
        with self._source_lock:
            if self._is_over:
                return None
            try:
                request = next(self._requests)
            except StopIteration:
                self._is_over = True
                return None
            index = self._num_requests
            self._num_requests += 1
        cancellation = _Cancellation()
        with self._lock:
            if self._is_cancelled:
                return None
            self._open.add(cancellation)
        return index, request, cancellation

    def _read(self, index: int, request: BatchRequest, cancellation: _Cancellation) -> None:
        try:
            with closing(iterate(self._start(index, request, cancellation))) as events:
                for event in events:
                    self.outbox.put((index, event))
        except PenstockError as error:
            self.outbox.put((index, error))
        finally:
            with self._has_closed_stream:
                self._open.discard(cancellation)
                self._has_closed_stream.notify_all()


async def read_batch(
    requests: Iterable[BatchRequest], start: StartStream, width: int
) -> AsyncGenerator[BatchItem, None]:
    """Yield the events of all requests as they arrive, as (index, event); for a request that fails,
    (index, error) is last. Waiting for the next event blocks the thread.

    At most `width` requests are open at a time. Closing the generator cancels open requests. An
    invalid request, or an exception from `requests`, ends the batch and is raised.
    """
    batch = _Batch(iter(requests), start, width)
    batch.add_thread()
    try:
        while (item := batch.outbox.get()) is not None:
            if isinstance(item, BatchFailed):
                raise item.error
            yield item
    finally:
        batch.cancel()
        batch.wait_until_closed()
