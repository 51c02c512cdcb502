"""Subscriptions to the prefix cache: the engine publishes its cached blocks to subscribed fronts
(gRPC server processes).

Contains the engine's end (`CacheFeeds`) and the front's end (`CacheSubscriber`). A snapshot is sent
in parts, a few per step, so that it does not delay tokens. Changes that occur while a snapshot is
sent are sent after it. The listeners of a front are notified when the connection to the engine is
lost; the next engine sends them a new snapshot.
"""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from penstock.scheduler.cache_index import CacheIndex, CacheWatch
from penstock.server.ipc.frames import CacheUpdate, EngineHello, Follow, SnapshotPart, Unfollow
from penstock.server.ipc.ports import CacheListener, EngineUnavailable
from penstock.server.ipc.wire import FrameError

MAX_FEEDS_PER_FRONT = 64
BLOCKS_PER_PART = 256
"""Blocks per frame. A gateway receives a frame as one gRPC message of at most 4 MB, which is enough
even for blocks of 4,000 tokens."""
_PARTS_PER_STEP = 4
"""Parts of one snapshot that are sent per step; they take about a millisecond."""


@dataclass(slots=True)
class _Feed:
    """One subscription. `next_part` is the index of the next part of the snapshot to send; it
    equals `num_parts` when all parts are sent."""

    ticket: int
    watch: CacheWatch
    num_parts: int
    next_part: int = 0


class CacheFeeds:
    """The subscriptions of all fronts. Without an index every subscription is rejected."""

    def __init__(self, cache_index: CacheIndex | None) -> None:
        self._cache_index = cache_index
        self._feeds: dict[tuple[int, int], _Feed] = {}

    @property
    def has_work(self) -> bool:
        """True if parts of a snapshot are unsent. Unsent changes do not count, because the step
        that causes them sends them."""
        return any(feed.next_part < feed.num_parts for feed in self._feeds.values())

    def follow(self, front_id: int, request: Follow) -> None:
        """Subscribe a front to the cached blocks whose hash chains begin with `request.salt`.

        Raises FrameError if the engine does not publish its blocks, if the front already uses
        `ticket` for another subscription, or if the front already has MAX_FEEDS_PER_FRONT
        subscriptions.
        """
        if self._cache_index is None:
            raise FrameError("cached blocks are not published")
        if (front_id, request.ticket) in self._feeds:
            raise FrameError("a ticket is used twice")
        if sum(front == front_id for front, _ in self._feeds) >= MAX_FEEDS_PER_FRONT:
            raise FrameError(f"a front may have at most {MAX_FEEDS_PER_FRONT} subscriptions")
        self._feeds[front_id, request.ticket] = _feed_of(
            self._cache_index, request.ticket, request.salt
        )

    def unfollow(self, front_id: int, ticket: int) -> None:
        """Unsubscribe. Does nothing if there is no such subscription."""
        feed = self._feeds.pop((front_id, ticket), None)
        if feed is not None and self._cache_index is not None:
            self._cache_index.unwatch(feed.watch)

    def front_disconnected(self, front_id: int) -> None:
        """Remove the subscriptions of a disconnected front."""
        for front, ticket in list(self._feeds):
            if front == front_id:
                self.unfollow(front, ticket)

    def take(self) -> list[tuple[int, CacheUpdate]]:
        """Return the updates to send after this step, each with the id of its front: the next parts
        of snapshots, and new changes."""
        updates: list[tuple[int, CacheUpdate]] = []
        for (front_id, ticket), feed in self._feeds.items():
            if feed.watch.is_overrun and self._cache_index is not None:
                # The recorded changes are incomplete: send a new snapshot instead, which is also
                # shorter.
                self._cache_index.unwatch(feed.watch)
                feed = self._feeds[front_id, ticket] = _feed_of(
                    self._cache_index, ticket, feed.watch.salt
                )
            updates += [(front_id, one) for one in _updates_of(feed)]
        return updates


def _feed_of(cache_index: CacheIndex, ticket: int, salt: bytes) -> _Feed:
    watch = cache_index.watch(salt)
    # An empty snapshot is sent too, because a snapshot invalidates earlier updates.
    num_parts = max(1, -(-watch.num_blocks // BLOCKS_PER_PART))
    return _Feed(ticket=ticket, watch=watch, num_parts=num_parts)


def _updates_of(feed: _Feed) -> list[CacheUpdate]:
    updates: list[CacheUpdate] = []
    last = min(feed.num_parts, feed.next_part + _PARTS_PER_STEP)
    for index in range(feed.next_part, last):
        part = SnapshotPart(index=index, num_parts=feed.num_parts, num_blocks=feed.watch.num_blocks)
        blocks = feed.watch.take_blocks(BLOCKS_PER_PART)
        updates.append(CacheUpdate(ticket=feed.ticket, changes=tuple(blocks), part=part))
    feed.next_part = last
    if last == feed.num_parts:
        changes = feed.watch.take_changes()
        for start in range(0, len(changes), BLOCKS_PER_PART):
            some = changes[start : start + BLOCKS_PER_PART]
            updates.append(CacheUpdate(ticket=feed.ticket, changes=tuple(some)))
    return updates


class CacheSubscriber:
    """The subscriptions of one front to changes of the prefix cache.

    `write` sends a frame, or raises EngineUnavailable.
    """

    def __init__(self, write: Callable[[Follow | Unfollow], None]) -> None:
        self._write = write
        self._listeners: dict[int, tuple[bytes, CacheListener]] = {}
        self._tickets = itertools.count()
        self._is_published = False

    def follow(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Subscribe `listener` to the cached blocks whose hash chains begin with `salt`.

        Returns a function that unsubscribes it.
        """
        ticket = next(self._tickets)
        self._listeners[ticket] = (salt, listener)
        self._send(Follow(ticket=ticket, salt=salt))

        def stop() -> None:
            if self._listeners.pop(ticket, None) is not None:
                self._send(Unfollow(ticket=ticket))

        return stop

    def on_hello(self, hello: EngineHello) -> None:
        """Send the subscriptions to a newly connected engine, if it publishes its cache."""
        self._is_published = hello.publishes_cache
        for ticket, (salt, _) in self._listeners.items():
            self._send(Follow(ticket=ticket, salt=salt))

    def on_update(self, update: CacheUpdate) -> None:
        """Pass an update to its listener. Ignored if the listener has unsubscribed meanwhile."""
        found = self._listeners.get(update.ticket)
        if found is not None:
            _, listener = found
            listener(update)

    def on_lost(self) -> None:
        """Notify the listeners that the connection to the engine is lost, if it published its
        cache."""
        if not self._is_published:
            return
        self._is_published = False
        for _, listener in list(self._listeners.values()):
            listener(None)

    def _send(self, frame: Follow | Unfollow) -> None:
        if self._is_published:
            # The connection is being lost; `on_hello` will send the subscription to the next
            # engine.
            with contextlib.suppress(EngineUnavailable):
                self._write(frame)
