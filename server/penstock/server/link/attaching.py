"""A front's side of streams that its engine keeps: it asks for them, and lets go of them.

Owns the tickets, and that whoever listens has an answer before anything that comes after it. Does
not know how frames travel, nor what a request is.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from penstock.scheduler.request import RequestSpec
from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.link.resume_frames import Attach, Attached, Detach, Kept

Arrive = Callable[[Attached], None]
LetGo = Callable[[str, tuple[int, ...]], None]
"""Takes the engine's name of a request, and the keys of its outputs."""


@runtime_checkable
class ResumePort(EnginePort, Protocol):
    """An `EnginePort` to an engine that keeps streams."""

    async def wait_up(self) -> None:
        """Return when an engine has said hello."""
        ...

    def submit_kept(self, specs: tuple[RequestSpec, ...], kept: Kept) -> None:
        """As `submit`, of a request that outlives its call."""
        ...

    async def attach_stream(self, name: str, arrive: Arrive) -> None:
        """Ask for a stream by the engine's name of its request.

        `arrive` is called with the answer, before anything that comes after it. Raises
        `EngineUnavailable`.
        """
        ...

    def detach(self, names: tuple[str, ...]) -> None:
        """Nobody reads these streams here any more. A no-op without an engine."""
        ...

    def on_detached(self, let_go: LetGo) -> None:
        """`let_go` is called with each request that another front has now, or nobody."""
        ...


class AttachDesk:
    """The questions of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Attach], None]) -> None:
        self._write = write
        self._let_go: LetGo | None = None
        self._open: dict[int, tuple[asyncio.Future[None], Arrive]] = {}
        self._next_ticket = 0

    def on_detached(self, let_go: LetGo) -> None:
        """See `ResumePort`."""
        self._let_go = let_go

    async def attach(self, name: str, arrive: Arrive) -> None:
        """See `ResumePort`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answered, arrive
        try:
            self._write(Attach(ticket=ticket, name=name))
            await answered
        finally:
            self._open.pop(ticket, None)

    def hear(self, word: Attached | Detach) -> None:
        """A frame of the engine."""
        if isinstance(word, Detach):
            for name in word.names:
                if self._let_go is not None:
                    self._let_go(name, word.keys)
            return
        answered, arrive = self._open.pop(word.ticket, (None, None))
        if answered is not None and arrive is not None and not answered.done():
            arrive(word)
            answered.set_result(None)

    def lose(self) -> None:
        """The engine is gone, and with it the questions."""
        questions, self._open = self._open, {}
        for answered, _ in questions.values():
            if not answered.done():
                answered.set_exception(EngineUnavailable("the engine went away"))
