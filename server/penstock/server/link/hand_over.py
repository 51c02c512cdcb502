"""Claims on requests that another front has, or had: who is asked, and who gets the answer.

Owns the claims under way. Answers one from the orphanage, or asks every other front and answers
with the first that gives; a front that goes meanwhile gives what the orphanage took in of it. One
request is on its way to one front at a time: who else claims it is heard when that has settled.
That nobody has a request is said only when all fronts there should be have said so; where one does
not answer in time, that it cannot be said. Knows no sockets: it says which frame goes to which
front.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.server.link.orphanage import Orphanage
from penstock.server.link.resume_frames import (
    Ask,
    Claim,
    ClaimAnswer,
    Gone,
    Inheritance,
    Keep,
    Lack,
    Settle,
)

Mail: TypeAlias = "list[tuple[int, Ask | ClaimAnswer | Gone]]"
"""Frames, each with the front it goes to."""
MAX_CLAIMS = 4096
MAX_WAIT_S = 0.5
"""How long a claim waits for others, and a sweep more: longer is no better than to ask again."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A claim. `front_id` None: whose it was is gone."""

    front_id: int | None
    ticket: int
    due_s: float


@dataclass(slots=True, eq=False)
class _Open:
    """A claim that fronts are asked for, or that is answered and not settled.

    `asked`: who has not answered. `spare`: the newest copy so far. `answer`: what the claimant was
    sent. `queue`: who else wants it.
    """

    claim: _Waiting
    ticket: int
    name: str
    asked: set[int]
    is_unsure: bool = False
    spare: Inheritance | None = None
    answer: Inheritance | None = None
    queue: deque[_Waiting] = field(default_factory=deque[_Waiting])


class HandOvers:
    """The claims of one engine's fronts.

    `cancel` ends what the engine has of a request, before it goes elsewhere under its name.
    `num_fronts`: there should be at least. `clock`: the engine's.
    """

    def __init__(
        self,
        orphanage: Orphanage,
        cancel: Callable[[str], object],
        *,
        num_fronts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._orphanage = orphanage
        self._cancel = cancel
        self._num_fronts = num_fronts
        self._clock = clock
        self._fronts: set[int] = set()
        self._open: dict[int, _Open] = {}
        self._by_name: dict[str, _Open] = {}
        self._unsettled: dict[tuple[int, int], _Open] = {}
        self._next_ticket = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._open) + self._num_waiting

    def claim(self, front_id: int, claim: Claim, fronts: Iterable[int]) -> Mail:
        """A front wants a request. `fronts`: those there are."""
        self._fronts = set(fronts)
        if len(self) >= MAX_CLAIMS:
            lack = ClaimAnswer(ticket=claim.ticket, inheritance=None, lack=Lack.TOO_MANY)
            return [(front_id, lack)]
        waiting = _Waiting(front_id, claim.ticket, self._clock() + MAX_WAIT_S)
        under_way = self._by_name.get(claim.name)
        if under_way is None:
            return self._begin(claim.name, waiting, deque())
        under_way.queue.append(waiting)
        self._num_waiting += 1
        return []

    def given(
        self,
        front_id: int,
        ticket: int,
        inheritance: Inheritance | None,
        lack: Lack = Lack.NOT_THERE,
    ) -> Mail:
        """A front's answer. One that comes too late changes nothing: that front has its copy."""
        claim = self._open.get(ticket)
        if claim is None or front_id not in claim.asked:
            return []
        claim.asked.discard(front_id)
        if inheritance is not None and not inheritance.is_spare:
            return self._answer(claim, inheritance)
        newest = claim.spare
        if inheritance is not None and (
            newest is None or inheritance.next_sequence > newest.next_sequence
        ):
            claim.spare = inheritance
        claim.is_unsure = claim.is_unsure or lack is not Lack.NOT_THERE
        return self._conclude(claim)

    def settle(self, front_id: int, settle: Settle) -> Mail:
        """What a front has made of its answer."""
        claim = self._unsettled.get((front_id, settle.ticket))
        answer = None if claim is None else claim.answer
        if claim is None or answer is None:
            return []
        del self._unsettled[front_id, settle.ticket]
        if not settle.is_taken:
            self._orphanage.take_in(claim.name, answer)
            return self._close(claim)
        others = sorted(self._fronts - {front_id})
        return [(other, Gone(name=claim.name)) for other in others] + self._close(claim)

    def is_elsewhere(self, front_id: int, keep: Keep) -> bool:
        """Whether the request that a front speaks of has become another's, who lives."""
        claim = self._by_name.get(keep.name)
        if claim is not None and claim.answer is not None:
            return claim.claim.front_id not in (None, front_id)
        return self._orphanage.owner_of(keep.name) not in (None, front_id)

    def front_came(self, front_id: int) -> Mail:
        """Another front is there: it may have what is wanted."""
        self._fronts.add(front_id)
        mail: Mail = []
        for claim in self._open.values():
            if claim.answer is None and claim.claim.front_id != front_id:
                claim.asked.add(front_id)
                mail.append((front_id, Ask(ticket=claim.ticket, name=claim.name)))
        return mail

    def front_gone(self, front_id: int) -> Mail:
        """A front is gone, and the orphanage has taken in what it had."""
        self._fronts.discard(front_id)
        mail: Mail = []
        for claim in tuple(self._open.values()):
            for waiting in (claim.claim, *claim.queue):
                if waiting.front_id == front_id:
                    waiting.front_id = None
            if claim.answer is not None and claim.claim.front_id is None:
                self._unsettled.pop((front_id, claim.claim.ticket), None)
                # What it may have made of it since is newer than what it was sent.
                if not self._orphanage.has(claim.name):
                    self._orphanage.take_in(claim.name, claim.answer)
                mail += self._close(claim)
            elif front_id in claim.asked:
                mail += self.given(front_id, claim.ticket, self._orphanage.take(claim.name))
        return mail

    def sweep(self) -> Mail:
        """To be called about once a second: nobody waits longer for a front that stands still."""
        now_s = self._clock()
        mail: Mail = []
        for claim in tuple(self._open.values()):
            late = [waiting for waiting in claim.queue if waiting.due_s <= now_s]
            for waiting in late:
                claim.queue.remove(waiting)
                self._num_waiting -= 1
                mail += _lacking(waiting, Lack.UNSURE)
            if claim.answer is None and claim.claim.due_s <= now_s:
                mail += _lacking(claim.claim, Lack.UNSURE)
                mail += self._close(claim)
        return mail

    def _begin(self, name: str, waiting: _Waiting, queue: deque[_Waiting]) -> Mail:
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        others = {other for other in self._fronts if other != waiting.front_id}
        claim = _Open(waiting, ticket, name, others, queue=queue)
        self._open[ticket] = self._by_name[name] = claim
        orphan = self._orphanage.take(name)
        if orphan is not None:
            return self._answer(claim, orphan)
        asks: Mail = [(other, Ask(ticket=ticket, name=name)) for other in sorted(claim.asked)]
        return asks + self._conclude(claim)

    def _conclude(self, claim: _Open) -> Mail:
        """Answer once everybody has said something, and nobody had more than a copy."""
        if claim.asked or len(self._fronts) < self._num_fronts:
            return []
        if claim.is_unsure:
            return _lacking(claim.claim, Lack.UNSURE) + self._close(claim)
        if claim.spare is not None:
            return self._answer(claim, claim.spare)
        return _lacking(claim.claim, Lack.NOT_THERE) + self._close(claim)

    def _answer(self, claim: _Open, inheritance: Inheritance) -> Mail:
        self._cancel(claim.name)
        # The ends of what was cancelled are yet to come: until then it must not look as if its
        # front had it.
        self._orphanage.forget(claim.name)
        front_id = claim.claim.front_id
        if front_id is None:
            self._orphanage.take_in(claim.name, inheritance)
            return self._close(claim)
        claim.answer = inheritance
        claim.asked.clear()
        self._unsettled[front_id, claim.claim.ticket] = claim
        return [(front_id, ClaimAnswer(ticket=claim.claim.ticket, inheritance=inheritance))]

    def _close(self, claim: _Open) -> Mail:
        """It is over: whoever has waited longest is next."""
        del self._open[claim.ticket]
        del self._by_name[claim.name]
        while claim.queue:
            waiting = claim.queue.popleft()
            self._num_waiting -= 1
            if waiting.front_id is not None:
                return self._begin(claim.name, waiting, claim.queue)
        return []


def _lacking(waiting: _Waiting, lack: Lack) -> Mail:
    if waiting.front_id is None:
        return []
    return [(waiting.front_id, ClaimAnswer(ticket=waiting.ticket, inheritance=None, lack=lack))]
