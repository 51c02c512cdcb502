"""Calls over a connection that wait for the frame with their ticket.

Does not know how frames travel, nor what is asked.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")
_NUM_TICKETS = 2**32


class PendingCalls(Generic[T]):
    """The calls of one kind, by ticket. Lives on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[T]] = {}
        self._next_ticket = 0

    def add(self) -> tuple[int, asyncio.Future[T]]:
        """A ticket for the request, and its answer to come."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % _NUM_TICKETS
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = answer
        answer.add_done_callback(lambda _: self._calls.pop(ticket, None))
        return ticket, answer

    def answer(self, ticket: int, value: T) -> None:
        """The answer has arrived. A no-op when it is no longer waited for."""
        call = self._calls.get(ticket)
        if call is not None and not call.done():
            call.set_result(value)

    def fail(self, error: Exception) -> None:
        """Fail the call: no answer will arrive."""
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(error)
