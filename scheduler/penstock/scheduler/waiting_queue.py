"""Manages the PENDING requests: which may be admitted, and when each is checked next.

`WaitingQueue` adds and removes requests in its order, in the sums over the waiting requests, in the
wait clock and in the shares of the queue. Other components use the last three directly.

`order` determines which request goes next. If the prompt of a request has full blocks, only its
first output, the leader, is in the order. The other outputs, the followers, wait outside it until
these blocks are computed and can be shared.

Heaps drop stale entries lazily: an entry is live while its request has the entry's ticket.
"""

import heapq
import itertools
from collections.abc import Iterator

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.displacement import Displacement
from penstock.scheduler.events import Wait
from penstock.scheduler.fair_order import FairOrder
from penstock.scheduler.forecast import QueuedAhead
from penstock.scheduler.queue_order import ArrivalOrder, QueueOrder
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.wait_clock import WaitClock
from penstock.scheduler.waiting_sums import WaitingSums


class WaitingQueue:
    """The PENDING requests. `num_tokens`: their tokens, cached ones included.

    `version` changes whenever a request enters `order` or leaves the queue. `order`: the order of
    requests that may be admitted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        tenants: TenantCounters,
        displacement: Displacement,
        sums: WaitingSums,
        waits: WaitClock,
    ) -> None:
        is_fair = config.order is SchedulingOrder.FAIR
        self.order: QueueOrder = FairOrder(tenants, config) if is_fair else ArrivalOrder()
        self._tenants = tenants
        self._displacement = displacement
        self._sums = sums
        self._waits = waits
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

    def push(self, request: Request, now: float) -> None:
        """Add a request that waits and may be admitted."""
        self._join(request, now)
        self._add_to_order(request)

    def hold(self, request: Request, leader_key: int, now: float) -> None:
        """Add a follower. It may not be admitted until `release_held(leader_key)` or until it
        becomes the leader.
        """
        self._join(request, now)
        self._held.setdefault(leader_key, []).append(request)

    def admit(self, request: Request, now: float, *, is_past_blocked: bool) -> tuple[Wait, bool]:
        """Remove a request that is admitted; return its wait, and whether it was chosen by age.

        `is_past_blocked`: it overtakes a request that lacks blocks.
        """
        order = self.order
        is_aged = order.note_admission(request)
        is_in_turn = not (is_aged or is_past_blocked)
        oldest = order.oldest_of_tenant(request) if is_in_turn else None
        wait = self._waits.admit(request, oldest, now)
        self._remove(request)
        return wait, is_aged

    def leave(self, request: Request, now: float) -> Wait:
        """Remove a request that ends while it waits; return its wait."""
        self._remove(request)
        return self._waits.leave(request, now)

    def release_held(self, leader_key: int) -> None:
        """Add the followers of a leader to the order, because the leader's prompt is computed."""
        for request in self._held.pop(leader_key, ()):
            if request in self:
                self._add_to_order(request)

    def replace_leader(self, leader_key: int) -> None:
        """Make the first follower the leader if the leader ended before its prompt was computed; a
        no-op without followers.
        """
        followers = [held for held in self._held.pop(leader_key, ()) if held in self]
        if followers:
            leader, *rest = followers
            self._add_to_order(leader)
            if rest:
                self._held[leader.spec.key] = rest

    def _remove(self, request: Request) -> None:
        del self._members[request.spec.key]
        self._displacement.leave(request)
        self.num_tokens -= len(request.tokens)
        self.version += 1
        self._tenants.leave(request.tenant)
        if request.ticket >= 0:
            request.ticket = -1
            self._sums.remove(request)
            self.order.discard(request)
        if len(self._rechecks) > 2 * len(self._members) + 64:
            self._rechecks = [
                entry
                for entry in self._rechecks
                if entry[2] in self and entry[2].recheck_s == entry[0]
            ]
            heapq.heapify(self._rechecks)

    def ahead_of(
        self, request: Request, num_prefill: int, *, is_under_share: bool = False
    ) -> QueuedAhead:
        """Return sums over the requests likely to precede a new request; see
        `WaitingSums.ahead_of`.
        """
        return self._sums.ahead_of(
            request, request.expiry_s, num_prefill, is_under_share=is_under_share
        )

    def due(self, now: float) -> list[Request]:
        """Return the waiting requests whose `recheck_s` is at or before `now`, ordered by that
        time, then by arrival. Each is returned only once.
        """
        found: dict[int, Request] = {}
        while self._rechecks and self._rechecks[0][0] <= now:
            at_s, _, request = heapq.heappop(self._rechecks)
            if request in self and request.recheck_s == at_s:
                found[request.spec.key] = request
        # The heap may have two entries of a request for the same time, or just the later one.
        return sorted(found.values(), key=lambda request: (request.recheck_s, request.sequence))

    def recheck(self, request: Request, at_s: float) -> None:
        """Set the `recheck_s` of a waiting request, the time from which `due` returns it; NO_TIME
        for never.
        """
        request.recheck_s = at_s
        if at_s != NO_TIME:
            heapq.heappush(self._rechecks, (at_s, next(self._tickets), request))

    def next_recheck_s(self) -> float:
        """Return the earliest `recheck_s` of the waiting requests, on the engine clock; NO_TIME if
        there is none.
        """
        rechecks = self._rechecks
        while rechecks and not (
            rechecks[0][2] in self and rechecks[0][2].recheck_s == rechecks[0][0]
        ):
            heapq.heappop(rechecks)
        return rechecks[0][0] if rechecks else NO_TIME

    def faults(self) -> list[str]:
        """Return a description of each inconsistency that is found between the waiting requests and
        the queue's order, sums and shares. The list is empty if there is none.
        """
        found = [*self._sums.faults(), *self._displacement.faults(tuple(self))]
        if sum(request.ticket >= 0 for request in self) != len(self.order):
            found.append("the order has a wrong number of requests")
        if len(self._sums) != len(self.order):
            found.append("the sums of the queue lack a request")
        if sum(len(request.tokens) for request in self) != self.num_tokens:
            found.append("the queue has a wrong number of tokens")
        return found

    def _join(self, request: Request, now: float) -> None:
        self._members[request.spec.key] = request
        self.num_tokens += len(request.tokens)
        request.tenant = self._tenants.join(request.spec.tenant)
        self._waits.join(request, now)
        self._displacement.join(request)
        self.recheck(request, request.recheck_s)

    def _add_to_order(self, request: Request) -> None:
        request.ticket = next(self._tickets)
        self.version += 1
        self._sums.add(request, request.expiry_s)
        self.order.push(request)
