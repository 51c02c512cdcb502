"""A front's side of hearing what is cached: who in it listens, through every engine's life.

Owns the tickets. Whoever listens hears of an engine's loss, and of the next one a new snapshot.
Does not know how frames travel, nor what is done with the update.
"""

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.server.link.cache_frames import CacheUpdate, Follow, Unfollow
from penstock.server.link.ports import EngineHello, EnginePort, EngineUnavailable

CacheListener: TypeAlias = Callable[[CacheUpdate | None], None]
"""Takes the update; None: the engine is gone, and with it all that was cached. Must not raise."""


@runtime_checkable
class CachePort(EnginePort, Protocol):
    """An `EnginePort` over which one can hear what is cached."""

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Tell `listener` of the blocks hashed from `salt` until what is returned is called.

        What is cached comes first. Where no engine is there, or one that keeps no book
        (`EngineHello.publishes_cache`), nothing comes until one does.
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
        """An engine is there; it is told who listens."""
        self._is_published = hello.publishes_cache
        for ticket, (salt, _) in self._listeners.items():
            self._send(Follow(ticket=ticket, salt=salt))

    def on_update(self, update: CacheUpdate) -> None:
        """A frame of the engine. It may be of one who has just stopped to listen."""
        found = self._listeners.get(update.ticket)
        if found is not None:
            _, listener = found
            listener(update)

    def on_lost(self) -> None:
        """The engine is gone, or the way to it."""
        if not self._is_published:
            return
        self._is_published = False
        for _, listener in list(self._listeners.values()):
            listener(None)

    def _send(self, frame: Follow | Unfollow) -> None:
        if self._is_published:
            # One that cannot be told is on its way out; the next is told when it greets.
            with contextlib.suppress(EngineUnavailable):
                self._write(frame)
