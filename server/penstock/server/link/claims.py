"""A front's side of hand-overs: its claims under way, and its answers to those of others.

Owns the tickets, and that an answer which nobody waits for any more goes back. Does not know how
frames travel, nor what a request is.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Give,
    Gone,
    Inheritance,
    Keep,
    Lack,
    Settle,
)

Word: TypeAlias = Ask | ClaimAnswer | Gone
"""What an engine says of hand-overs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claimed:
    """A request that was claimed. `settle` must be called once, by the claimant.

    With True: it goes on here, and everybody else lets go of it. With False: it does not.
    """

    inheritance: Inheritance
    settle: Callable[[bool], None]


class Keeper(Protocol):
    """Whoever has a front's requests. Neither may block or raise."""

    def give(self, name: str, answer: Callable[[Inheritance | Lack], None]) -> None:
        """Give a request away by the engine's name for it: tell `answer` once, now or later.

        From then on there is a spare copy of it here, at most.
        """
        ...

    def let_go(self, name: str) -> None:
        """Another front has this request for certain."""
        ...


@runtime_checkable
class ClaimPort(EnginePort, Protocol):
    """An `EnginePort` over which requests come and go between fronts."""

    async def wait_up(self) -> None:
        """Return when an engine has said hello."""
        ...

    def keep(self, keep: Keep) -> None:
        """A request that was just submitted outlives this front. A no-op without an engine."""
        ...

    async def claim(self, name: str) -> Claimed | Lack:
        """Whatever there is of a request that is not here. Raises `EngineUnavailable`."""
        ...

    def on_asked(self, keeper: Keeper) -> None:
        """`keeper` answers others' claims."""
        ...


class ClaimDesk:
    """The claims of one port. `write` sends a frame or raises EngineUnavailable."""

    def __init__(self, write: Callable[[Claim | Give | Settle], None]) -> None:
        self._write = write
        self._keeper: Keeper | None = None
        self._answers: dict[int, asyncio.Future[Claimed | Lack]] = {}
        self._next_ticket = 0
        self._num_lost = 0

    def on_asked(self, keeper: Keeper) -> None:
        """See `ClaimPort`."""
        self._keeper = keeper

    async def claim(self, name: str) -> Claimed | Lack:
        """See `ClaimPort`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        answer: asyncio.Future[Claimed | Lack] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        try:
            self._write(Claim(ticket=ticket, name=name))
            return await answer
        finally:
            self._answers.pop(ticket, None)

    def hear(self, word: Word) -> None:
        """A frame of the engine."""
        match word:
            case Ask():
                self._asked(word)
            case Gone():
                if self._keeper is not None:
                    self._keeper.let_go(word.name)
            case ClaimAnswer():
                self._answered(word)

    def lose(self) -> None:
        """The engine is gone, and with it the claims."""
        self._num_lost += 1
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine went away"))

    def _asked(self, ask: Ask) -> None:
        num_lost = self._num_lost

        def give(found: Inheritance | Lack) -> None:
            if isinstance(found, Lack):
                frame = Give(ticket=ask.ticket, inheritance=None, lack=found)
            else:
                frame = Give(ticket=ask.ticket, inheritance=found)
            self._tell(frame, num_lost)

        if self._keeper is None:
            give(Lack.NOT_THERE)
        else:
            self._keeper.give(ask.name, give)

    def _answered(self, word: ClaimAnswer) -> None:
        num_lost = self._num_lost
        answer = self._answers.get(word.ticket)

        def settle(is_taken: bool) -> None:
            self._tell(Settle(ticket=word.ticket, is_taken=is_taken), num_lost)

        if answer is None or answer.done():
            if word.inheritance is not None:
                settle(False)
        elif word.inheritance is None:
            answer.set_result(word.lack)
        else:
            answer.set_result(Claimed(inheritance=word.inheritance, settle=settle))

    def _tell(self, frame: Give | Settle, num_lost: int) -> None:
        """Answer the engine that asked; another does not know what it is about."""
        if num_lost == self._num_lost:
            with contextlib.suppress(EngineUnavailable):
                self._write(frame)
