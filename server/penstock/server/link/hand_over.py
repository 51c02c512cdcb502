"""Claims on requests that another front has, or had: who is asked, and who gets the answer.

Owns the claims under way. Answers one from the orphanage, or asks every other front and answers
with the first that gives; a front that goes meanwhile gives what the orphanage took in of it. Knows
no sockets: it says which frame goes to which front.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.server.link.orphanage import Orphanage
from penstock.server.link.resume_frames import Ask, Claim, ClaimAnswer, Inheritance

Mail: TypeAlias = "list[tuple[int, Ask | ClaimAnswer]]"
"""Frames, each with the front it goes to."""
_MAX_CLAIMS = 4096


@dataclass(slots=True, eq=False)
class _Open:
    """A claim under way. `front_id` None: whose it was is gone. `asked`: who has not answered."""

    front_id: int | None
    ticket: int
    name: str
    asked: set[int]


class HandOvers:
    """The claims of one engine's fronts.

    `cancel` ends what the engine has of a request, before it goes elsewhere under its name.
    """

    def __init__(self, orphanage: Orphanage, cancel: Callable[[str], object]) -> None:
        self._orphanage = orphanage
        self._cancel = cancel
        self._open: dict[int, _Open] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._open)

    def claim(self, front_id: int, claim: Claim, fronts: Iterable[int]) -> Mail:
        """A front wants a request. `fronts`: those there are."""
        inheritance = self._orphanage.take(claim.name)
        others = {other for other in fronts if other != front_id}
        if inheritance is not None:
            self._cancel(claim.name)
        if inheritance is not None or not others or len(self._open) >= _MAX_CLAIMS:
            return [(front_id, ClaimAnswer(ticket=claim.ticket, inheritance=inheritance))]
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        self._open[ticket] = _Open(front_id, claim.ticket, claim.name, others)
        return [(other, Ask(ticket=ticket, name=claim.name)) for other in sorted(others)]

    def given(self, front_id: int, ticket: int, inheritance: Inheritance | None) -> Mail:
        """A front's answer. What nobody waits for any more goes to the orphanage."""
        claim = self._open.get(ticket)
        if claim is None or front_id not in claim.asked:
            return []
        claim.asked.discard(front_id)
        if inheritance is None and claim.asked:
            return []
        del self._open[ticket]
        if inheritance is not None:
            self._cancel(claim.name)
        if claim.front_id is not None:
            return [(claim.front_id, ClaimAnswer(ticket=claim.ticket, inheritance=inheritance))]
        if inheritance is not None:
            self._orphanage.take_in(claim.name, inheritance)
        return []

    def front_gone(self, front_id: int) -> Mail:
        """A front is gone, and the orphanage has taken in what it had."""
        mail: Mail = []
        for ticket, claim in tuple(self._open.items()):
            if claim.front_id == front_id:
                claim.front_id = None
            if front_id in claim.asked:
                mail += self.given(front_id, ticket, self._orphanage.take(claim.name))
        return mail
