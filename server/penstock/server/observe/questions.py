"""Questions that wait for their answers on one connection.

Owns the tickets. Does not know what is asked, nor over what.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")
_NUM_TICKETS = 2**32


class Questions(Generic[T]):
    """Lives on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[T]] = {}
        self._next_ticket = 0

    def ask(self) -> tuple[int, asyncio.Future[T]]:
        """A ticket for the question, and its answer to come."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % _NUM_TICKETS
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(ticket, None))
        return ticket, answer

    def answer(self, ticket: int, value: T) -> None:
        """The answer is here; nothing when nobody waits for it any more."""
        waiting = self._waiting.get(ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def fail(self, error: Exception) -> None:
        """Nobody will answer what is open."""
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)
