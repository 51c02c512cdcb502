"""A front's side of streams that its engine keeps: attaches and detaches them.

Owns the tickets, and that a caller gets the answer before any later event. Does not know how frames
travel, nor what a request is.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from penstock.scheduler.request import RequestSpec
from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.link.resume_frames import Attach, Attached, Detach, KeptRequest

AttachListener = Callable[[Attached], None]
DetachListener = Callable[[str, tuple[int, ...]], None]
"""Takes the engine's name of a request, and the keys of its outputs."""


@runtime_checkable
class ResumePort(EnginePort, Protocol):
    """An `EnginePort` to an engine that keeps streams."""

    async def wait_up(self) -> None:
        """Return when an engine has connected."""
        ...

    def submit_kept(self, specs: tuple[RequestSpec, ...], kept: KeptRequest) -> None:
        """As `submit`, of a request that outlives its call."""
        ...

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """Request a stream by the engine's name of its request.

        `on_attached` is called with the answer, before any later event. Raises `EngineUnavailable`.
        """
        ...

    def detach(self, names: tuple[str, ...]) -> None:
        """Report that these streams have no reader here any more. A no-op without an engine."""
        ...

    def on_detached(self, listener: DetachListener) -> None:
        """`listener` is called for each request that another front took over, or that was
        dropped.
        """
        ...


class AttachCalls:
    """The pending attach calls of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Attach], None]) -> None:
        self._write = write
        self._on_detached: DetachListener | None = None
        self._open: dict[int, tuple[asyncio.Future[None], AttachListener]] = {}
        self._next_ticket = 0

    def on_detached(self, listener: DetachListener) -> None:
        """See `ResumePort`."""
        self._on_detached = listener

    async def attach(self, name: str, on_attached: AttachListener) -> None:
        """See `ResumePort`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answered, on_attached
        try:
            self._write(Attach(ticket=ticket, name=name))
            await answered
        finally:
            self._open.pop(ticket, None)

    def on_frame(self, frame: Attached | Detach) -> None:
        """A frame of the engine."""
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
        """The engine is lost, and with it the pending calls."""
        questions, self._open = self._open, {}
        for answered, _ in questions.values():
            if not answered.done():
                answered.set_exception(EngineUnavailable("the engine was lost"))
