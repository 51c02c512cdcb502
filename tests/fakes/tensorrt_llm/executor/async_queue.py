"""The queue between the engine and one consumer.

It has a hazard of the real queue: a caller that fills many queues wakes only one event loop, and
sets the events of all queues there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class AsyncQueue(Generic[ItemT]):
    """An unbounded queue that belongs to the event loop in which it is created."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[ItemT] = deque()
        self._event = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: ItemT) -> None:
        """Add an item without waking the reader; callable from any thread."""
        self._items.append(item)

    async def get(self, timeout_s: float | None = None) -> ItemT:
        """Return the next item. Raises TimeoutError after `timeout_s` without one."""
        while not self._items:
            # Another reader may have taken the item that woke this one.
            self._event.clear()
            await asyncio.wait_for(self._event.wait(), timeout_s)
        item = self._items.popleft()
        if not self._items:
            self._event.clear()
        return item

    @staticmethod
    def notify_many(loop: asyncio.AbstractEventLoop, queues: Sequence[AsyncQueue[ItemT]]) -> None:
        """Set the events of all non-empty `queues` from `loop`, whichever loops the queues belong
        to; do nothing if `loop` is closed.
        """

        def notify() -> None:
            for each in queues:
                if each._items:
                    each._event.set()

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(notify)
