"""The two interfaces between a front and an engine.

Owns the protocols, and the pending attach calls of a port: a caller gets the answer before any
later event. A front calls an `EnginePort` and listens as an `EnginePortListener`; neither knows
whether the engine is in this process (tests) or behind a Unix socket. All calls happen on the
front's event loop.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol, TypeAlias

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.frames import (
    Attach,
    Attached,
    CacheUpdate,
    Detach,
    EngineHello,
    KeptRequest,
)

AttachListener: TypeAlias = Callable[[Attached], None]
DetachListener: TypeAlias = Callable[[str, tuple[int, ...]], None]
"""Called with the engine's name of a request, and the keys of its outputs."""
CacheListener: TypeAlias = Callable[[CacheUpdate | None], None]
"""Called with an update; None: the engine is lost, and its cache with it. Must not raise."""


class EnginePort(Protocol):
    """The engine as a front sees it. Methods that are not coroutines do not block."""

    @property
    def is_up(self) -> bool:
        """True between an engine's hello and its loss."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes buffered here until the engine reads them."""
        ...

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Submit the outputs of one request, leader first.

        A refusal (queue full, id in use, too large) arrives as one `Failed` end per spec. Raises
        `EngineUnavailable` when the engine is down.
        """
        ...

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """Cancel requests, with `reason`; a `Finished` event follows for each live one.

        Idempotent; unknown keys are ignored. A no-op when the engine is down.
        """
        ...

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """Cancel a live request of any front by its id.

        Returns its state, None if there is none. Its front receives `Finished` with CANCELLED.
        Raises `EngineUnavailable`.
        """
        ...

    async def wait_up(self) -> None:
        """Wait until an engine has connected."""
        ...

    def submit_kept(self, specs: tuple[RequestSpec, ...], kept: KeptRequest) -> None:
        """Like `submit`, for a request that outlives its call."""
        ...

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """Request the stream of a request, by the engine's name.

        `on_attached` is called with the answer, before any later event. Raises `EngineUnavailable`.
        """
        ...

    def detach(self, names: tuple[str, ...]) -> None:
        """Report that these streams have no reader here any more. A no-op without an engine."""
        ...

    def on_detached(self, listener: DetachListener) -> None:
        """Call `listener` for each request that another front took over, or that was dropped."""
        ...

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Subscribe `listener` to the blocks hashed from `salt`; call the result to unsubscribe.

        The first updates are a snapshot. There are none until an engine that publishes its cache
        (`EngineHello.publishes_cache`) has connected.
        """
        ...


class EnginePortListener(Protocol):
    """A front as the engine sees it. Must not block; must not raise."""

    def on_hello(self, hello: EngineHello) -> None:
        """Handle a new connection. The engine knows no request of an earlier engine."""
        ...

    def on_events(self, events: StepEvents) -> None:
        """Handle one step's events, which concern only this front's keys."""
        ...

    def on_lost(self) -> None:
        """Handle the loss of the engine: all its requests are lost."""
        ...


class EngineUnavailable(Exception):
    """No engine is connected."""


class AttachCalls:
    """The pending attach calls of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Attach], None]) -> None:
        self._write = write
        self._on_detached: DetachListener | None = None
        self._open: dict[int, tuple[asyncio.Future[None], AttachListener]] = {}
        self._tickets = itertools.count()

    def on_detached(self, listener: DetachListener) -> None:
        """See `EnginePort`."""
        self._on_detached = listener

    async def attach(self, name: str, on_attached: AttachListener) -> None:
        """See `EnginePort`."""
        ticket = next(self._tickets)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answered, on_attached
        try:
            self._write(Attach(ticket=ticket, name=name))
            await answered
        finally:
            self._open.pop(ticket, None)

    def on_frame(self, frame: Attached | Detach) -> None:
        """Handle a frame of the engine."""
        if isinstance(frame, Detach):
            for name in frame.names:
                if self._on_detached is not None:
                    self._on_detached(name, frame.keys)
            return
        answered, on_attached = self._open.pop(frame.ticket, (None, None))
        if answered is not None and on_attached is not None and not answered.done():
            on_attached(frame)
            answered.set_result(None)

    def on_lost(self) -> None:
        """Fail the pending calls: the engine is lost."""
        questions, self._open = self._open, {}
        for answered, _ in questions.values():
            if not answered.done():
                answered.set_exception(EngineUnavailable("the engine was lost"))
