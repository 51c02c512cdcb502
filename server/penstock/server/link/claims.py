"""A front's side of hand-overs: its claims under way, and its answers to those of others.

Owns the tickets. Does not know how frames travel, nor what a request is.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Give,
    Inheritance,
    Keep,
)

Giver = Callable[[str], Inheritance | None]
"""Gives a request away by the engine's name for it, if it is here: then it is not any more."""


@runtime_checkable
class ClaimPort(EnginePort, Protocol):
    """An `EnginePort` over which requests come and go between fronts."""

    def keep(self, keep: Keep) -> None:
        """A request that was just submitted outlives this front. A no-op without an engine."""
        ...

    async def claim(self, name: str) -> Inheritance | None:
        """Whatever there is of a request that is not here; None where nobody has it.

        Raises `EngineUnavailable`.
        """
        ...

    def on_asked(self, giver: Giver) -> None:
        """`giver` answers others' claims. It must neither block nor raise."""
        ...


class ClaimDesk:
    """The claims of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Claim | Give], None]) -> None:
        self._write = write
        self._giver: Giver = lambda _: None
        self._answers: dict[int, asyncio.Future[Inheritance | None]] = {}
        self._next_ticket = 0

    def on_asked(self, giver: Giver) -> None:
        """See `ClaimPort`."""
        self._giver = giver

    async def claim(self, name: str) -> Inheritance | None:
        """See `ClaimPort`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        answer: asyncio.Future[Inheritance | None] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        try:
            self._write(Claim(ticket=ticket, name=name))
            return await answer
        finally:
            self._answers.pop(ticket, None)

    def hear(self, frame: Ask | ClaimAnswer) -> None:
        """A frame of the engine."""
        if isinstance(frame, Ask):
            self._write(Give(ticket=frame.ticket, inheritance=self._giver(frame.name)))
            return
        answer = self._answers.get(frame.ticket)
        if answer is not None and not answer.done():
            answer.set_result(frame.inheritance)

    def lose(self) -> None:
        """The engine is gone, and with it the claims."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine went away"))
