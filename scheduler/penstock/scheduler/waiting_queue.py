"""Waiting requests: membership, totals, and when to check them again.

Owns membership, the counters of the bounds, and when to check each PENDING request again; an
`Order` owns which goes next. Outputs of one request wait outside the order (`hold`) until their
leader's prompt is computed and can be shared.

Heaps drop stale entries lazily: an entry is live while its request has the entry's ticket.
"""

import heapq
import itertools
from collections.abc import Iterator
from typing import Protocol

from penstock.scheduler.forecast import Ahead
from penstock.scheduler.queue_places import QueuePlaces
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.waiting_sums import WaitingSums


class Order(Protocol):
    """Orders requests that have a ticket. No call costs more than a heap's."""

    def __len__(self) -> int:
        """Requests in the order."""
        ...

    def push(self, request: Request) -> None:
        """Order a request that has just got its ticket."""
        ...

    def discard(self, request: Request) -> None:
        """Forget a request whose ticket was just taken."""
        ...

    def note_admission(self, request: Request) -> bool:
        """A request is about to be admitted, and still has a ticket; whether for its age alone."""
        ...

    def eldest_beside(self, request: Request) -> Request | None:
        """Of the requests that wait in its class for its tenant, itself included, the eldest.

        None when no other tenant waits there, or tenants have no turns.
        """
        ...

    def first(self, max_num: int) -> list[Request]:
        """At most that many next requests if nothing changed; slow, for operators.

        Without those of tenants at their running limit. Changes nothing.
        """
        ...

    def peek(self, now: float) -> Request | None:
        """The next request, None when none may go."""
        ...

    def peek_in_turn(self, now: float) -> Request | None:
        """The next request without preference for age; None when a turn by age is overdue."""
        ...

    def pass_over(self, request: Request) -> None:
        """Skip the request that `peek` returned until `end_round`."""
        ...

    def end_round(self) -> None:
        """Skipped requests return to their places."""
        ...

    def release(self, tenant: int) -> None:
        """A tenant at its running limit runs one less."""
        ...


def expiry_s(request: Request) -> float:
    """When a request that still waits is no longer worth running, engine clock."""
    spec = request.spec
    ttft = spec.ttft_deadline_s if request.first_token_s == NO_TIME else NO_TIME
    return min(spec.deadline_s, spec.time_limit_s, ttft)


class WaitingQueue:
    """PENDING requests; `num_tokens` counts the tokens they would prefill.

    `version` changes whenever a request comes or goes. `sums`: of those in the order. `places`:
    which requests give way when the queue is full.
    """

    def __init__(
        self, order: Order, tenants: Tenants, sums: WaitingSums, places: QueuePlaces
    ) -> None:
        self.order = order
        self.places = places
        self.sums = sums
        self._tenants = tenants
        self._tickets = itertools.count()
        self._rechecks: list[tuple[float, int, Request]] = []
        self._held: dict[int, list[Request]] = {}
        self._members: dict[int, Request] = {}
        self.num_tokens = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.spec.key) is request

    def push(self, request: Request) -> None:
        """Add a request to the order."""
        self._join(request)
        self._enter(request)

    def hold(self, request: Request, leader_key: int) -> None:
        """Let a request wait until `release_held(leader_key)`."""
        self._join(request)
        self._held.setdefault(leader_key, []).append(request)

    def release_held(self, leader_key: int) -> None:
        """The leader's prompt is computed: its followers enter the order."""
        for request in self._held.pop(leader_key, ()):
            if request in self:
                self._enter(request)

    def replace_leader(self, leader_key: int) -> None:
        """The leader ended before its prompt was computed: the next follower leads."""
        followers = [held for held in self._held.pop(leader_key, ()) if held in self]
        if followers:
            heir, *rest = followers
            self._enter(heir)
            if rest:
                self._held[heir.spec.key] = rest

    def peek(self, now: float) -> Request | None:
        """The next request, None when none may go."""
        return self.order.peek(now)

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it is."""
        del self._members[request.spec.key]
        self.places.leave(request)
        self.num_tokens -= len(request.tokens)
        self.version += 1
        self._tenants.leave(request.tenant)
        if request.ticket >= 0:
            request.ticket = -1
            self.sums.remove(request)
            self.order.discard(request)
        if len(self._rechecks) > 2 * len(self._members) + 64:
            self._rechecks = [
                entry
                for entry in self._rechecks
                if entry[2] in self and entry[2].recheck_s == entry[0]
            ]
            heapq.heapify(self._rechecks)

    def ahead_of(self, request: Request, num_prefill: int, *, is_light: bool = False) -> Ahead:
        """The requests likely to go before one that does not wait yet."""
        return self.sums.ahead_of(request, expiry_s(request), num_prefill, is_light=is_light)

    def due(self, now: float) -> list[Request]:
        """Waiting requests whose `recheck_s` is at or before `now`; each is returned once."""
        found: dict[int, Request] = {}
        while self._rechecks and self._rechecks[0][0] <= now:
            at_s, _, request = heapq.heappop(self._rechecks)
            if request in self and request.recheck_s == at_s:
                found[request.spec.key] = request
        return list(found.values())

    def recheck(self, request: Request, at_s: float) -> None:
        """Return a waiting request from `due` when that time has come."""
        request.recheck_s = at_s
        if at_s != NO_TIME:
            heapq.heappush(self._rechecks, (at_s, next(self._tickets), request))

    def next_recheck_s(self) -> float:
        """When the next waiting request is due, NO_TIME when none is."""
        rechecks = self._rechecks
        while rechecks and not (
            rechecks[0][2] in self and rechecks[0][2].recheck_s == rechecks[0][0]
        ):
            heapq.heappop(rechecks)
        return rechecks[0][0] if rechecks else NO_TIME

    def _join(self, request: Request) -> None:
        self._members[request.spec.key] = request
        self.num_tokens += len(request.tokens)
        request.tenant = self._tenants.join(request.spec.tenant)
        self.places.join(request)
        self.recheck(request, request.recheck_s)

    def _enter(self, request: Request) -> None:
        request.ticket = next(self._tickets)
        self.version += 1
        self.sums.add(request, expiry_s(request))
        self.order.push(request)
