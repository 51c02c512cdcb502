"""A front's side of cache subscriptions, across restarts of the engine.

Owns the tickets. Listeners are notified when the engine is lost, and get a new snapshot from the
next one. Does not know how frames travel, nor what is done with the updates.
"""

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.server.link.cache_frames import CacheUpdate, Follow, Unfollow
from penstock.server.link.ports import EngineHello, EnginePort, EngineUnavailable

CacheListener: TypeAlias = Callable[[CacheUpdate | None], None]
"""Takes an update; None: the engine is lost, and so is its cache. Must not raise."""


@runtime_checkable
class CachePort(EnginePort, Protocol):
    """An `EnginePort` that can subscribe to cached blocks."""

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Subscribe `listener` to the blocks hashed from `salt`; call the result to unsubscribe.

        The first updates are a snapshot. Without an engine, or with one that does not publish
        (`EngineHello.publishes_cache`), none come until there is one that does.
        """
        ...


class CacheSubscriber:
    """The listeners of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Follow | Unfollow], None]) -> None:
        self._write = write
        self._listeners: dict[int, tuple[bytes, CacheListener]] = {}
        self._next_ticket = 0
        self._is_published = False

    def follow(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """See `CachePort.follow_cache`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        self._listeners[ticket] = (salt, listener)
        self._send(Follow(ticket=ticket, salt=salt))

        def stop() -> None:
            if self._listeners.pop(ticket, None) is not None:
                self._send(Unfollow(ticket=ticket))

        return stop

    def on_hello(self, hello: EngineHello) -> None:
        """An engine has connected: send it the subscriptions."""
        self._is_published = hello.publishes_cache
        for ticket, (salt, _) in self._listeners.items():
            self._send(Follow(ticket=ticket, salt=salt))

    def on_update(self, update: CacheUpdate) -> None:
        """A frame of the engine; its listener may just have unsubscribed."""
        found = self._listeners.get(update.ticket)
        if found is not None:
            _, listener = found
            listener(update)

    def on_lost(self) -> None:
        """The connection to the engine is lost."""
        if not self._is_published:
            return
        self._is_published = False
        for _, listener in list(self._listeners.values()):
            listener(None)

    def _send(self, frame: Follow | Unfollow) -> None:
        if self._is_published:
            # The connection is being lost; the next engine gets it at its hello.
            with contextlib.suppress(EngineUnavailable):
                self._write(frame)
