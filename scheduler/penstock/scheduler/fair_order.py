"""The fair order of the queue: by priority class, tenant, deadline and age (against starvation).

Defines only the order: batch_admission.py decides which requests fit, and tenant_counters.py
counts the service of each tenant.

- **Class.** A higher priority goes first.
- **Tenant.** Inside a class the tenant with the least weighted service goes next (virtual token
  counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). While two tenants
  have requests waiting in the same class, and none is admitted by age or past a blocked head, their
  counters differ by at most B + (w_p * P + w_q * S * O) / w: P the longest prompt, S the number of
  slots, O the longest output, w the smaller of their weights, and B `tenant_burst_tokens`, the
  credit of a tenant that was idle. (Proof: at its last admission the tenant with the higher counter
  did not have the higher counter yet. Since then it was charged one prompt and the remaining
  outputs of its slots.)
- **Deadline.** Inside a tenant's part of a class, preempted requests go first, then the earliest
  deadline. A deadline counts as at most arrival + `aging_s`, so that requests that arrive after
  that time never overtake it; ties are broken by arrival.
- **Age.** Priority rises by one for each `aging_s` of waiting, so the first request by age is the
  request with the least arrival - priority * aging_s. If age always decided, a tenant that floods
  the engine would outrank all others as soon as its queue is long. So age decides only one in
  `aging_stride` admissions, and only while the first request by age has waited for `aging_s`. Once
  an admission by age is due, at most `aging_stride` requests of tenants under their share
  (fair_share.py) still go before it.

**Bound.** Let request r have priority p and arrive at time a, and let P be the highest priority of
any arrival. Every request that precedes r by age arrived before a + (P - p) * aging_s. So from time
a + (P - p + 1) * aging_s on, while r waits, the first request by age has waited for `aging_s`. From
then on at most 2 * aging_stride * (N + 1) admissions precede r's, where N is the number of requests
that precede r by age; half of that without tenants under their share. N does not grow, because
later arrivals do not precede r. (Not counted: preempted requests, which go before new ones of their
tenant and were admitted before, and requests that overtake a blocked head, which batch_admission.py
bounds. A tenant at its running limit waits for its own requests.)

Keys can only grow while they are in a heap. Every heap drops stale entries and corrects outdated
keys when they reach the top, so a call costs as much as a heap operation, however many requests
wait.
"""

import heapq
import itertools
import math
from bisect import insort
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.request import Request
from penstock.scheduler.tenant_counters import TenantCounters

MAX_SKIPPED_PER_TENANT = 4
"""Maximum number of requests of one tenant that are skipped (`skip`) before those of the next
tenant are tried.
"""

# Keys: is new, due time, sequence, ticket; and arrival, sequence, ticket. Tickets are unique, so
# requests themselves are never compared.
_ByDeadline: TypeAlias = tuple[bool, float, int, int, Request]
_ByArrival: TypeAlias = tuple[float, int, int, Request]


@dataclass(slots=True, eq=False)
class _TenantQueue:
    """The waiting requests of one tenant in one class.

    `turn_ticket` and `age_ticket` identify its valid entries in the two heaps of queues; -1 for
    none.
    """

    priority: int
    tenant: int
    by_deadline: list[_ByDeadline] = field(default_factory=list[_ByDeadline])
    by_arrival: list[_ByArrival] = field(default_factory=list[_ByArrival])
    num_requests: int = 0
    turn_ticket: int = -1
    age_ticket: int = -1
    age_key: float = math.inf
    num_skipped: int = 0
    is_held_back: bool = False

    def oldest(self) -> Request:
        heap = self.by_arrival
        while heap[0][2] != heap[0][3].ticket:
            heapq.heappop(heap)
        return heap[0][3]

    def compact(self) -> None:
        limit = 2 * self.num_requests + 64
        if len(self.by_deadline) > limit:
            self.by_deadline = [e for e in self.by_deadline if e[3] == e[4].ticket]
            heapq.heapify(self.by_deadline)
        if len(self.by_arrival) > limit:
            self.by_arrival = [e for e in self.by_arrival if e[2] == e[3].ticket]
            heapq.heapify(self.by_arrival)


class FairOrder:
    """A `QueueOrder` that implements the fair order, using the service counters of `tenants`."""

    def __init__(self, tenants: TenantCounters, config: SchedulerConfig) -> None:
        self._tenants = tenants
        self._aging_s = config.aging_s
        self._is_aging = math.isfinite(config.aging_s)
        self._stride = config.aging_stride
        self._queues: dict[tuple[int, int], _TenantQueue] = {}
        # Negated priorities of the classes that have queues, most urgent first.
        self._ranks: list[int] = []
        # By negated priority: (service, ticket, queue), and the number of live queues.
        self._turns: dict[int, list[tuple[float, int, _TenantQueue]]] = {}
        self._num_queues: dict[int, int] = {}
        self._ages: list[tuple[float, int, _TenantQueue]] = []
        self._held_back: dict[int, list[_TenantQueue]] = {}
        self._tickets = itertools.count()
        self._epoch = tenants.epoch
        self._num_requests = 0
        self._num_since_aged = 0
        # Number of requests admitted in fair order while an admission by age was due.
        self._num_before_age = 0
        self._is_before_aged = False
        self._aged: Request | None = None
        self._skipped: set[int] = set()
        self._stash: list[tuple[_TenantQueue, _ByDeadline]] = []
        self._touched: list[_TenantQueue] = []
        self._left_out: list[_TenantQueue] = []

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        """Add a request. The caller has set its `ticket`."""
        spec = request.spec
        key = (spec.priority, request.tenant)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _TenantQueue(*key)
            self._open_class(-spec.priority)
            self._queue_turn(queue)
        due_s = min(request.expiry_s, spec.arrival_s + self._aging_s)
        is_fresh = request.num_preemptions == 0
        heapq.heappush(
            queue.by_deadline, (is_fresh, due_s, request.sequence, request.ticket, request)
        )
        queue.num_requests += 1
        self._num_requests += 1
        heapq.heappush(
            queue.by_arrival, (spec.arrival_s, request.sequence, request.ticket, request)
        )
        # If the oldest arrival became later, the entry is corrected when it reaches the top; if it
        # became earlier, a new entry is pushed now.
        is_earlier = self._is_aging and self._age_key(queue, request) < queue.age_key
        if is_earlier and not queue.is_held_back:
            self._queue_age(queue, request)

    def discard(self, request: Request) -> None:
        """Remove a request. The caller has set its `ticket` to -1."""
        queue = self._queues[request.spec.priority, request.tenant]
        queue.num_requests -= 1
        self._num_requests -= 1
        if self._aged is request:
            self._aged = None
        if queue.num_requests:
            queue.compact()
            return
        del self._queues[queue.priority, queue.tenant]
        if queue.is_held_back:
            self._held_back[queue.tenant].remove(queue)
        queue.turn_ticket = queue.age_ticket = -1
        rank = -queue.priority
        self._num_queues[rank] -= 1
        if not self._num_queues[rank]:
            self._ranks.remove(rank)
            del self._num_queues[rank], self._turns[rank]
        elif len(self._turns[rank]) > 2 * self._num_queues[rank] + 64:
            self._turns[rank] = [e for e in self._turns[rank] if e[1] == e[2].turn_ticket]
            heapq.heapify(self._turns[rank])
        if len(self._ages) > 2 * len(self._queues) + 64:
            self._ages = [e for e in self._ages if e[1] == e[2].age_ticket]
            heapq.heapify(self._ages)

    def note_admission(self, request: Request) -> bool:
        """Record an admission; return whether it was decided by age."""
        is_aged = request is self._aged
        self._num_since_aged = 0 if is_aged else self._num_since_aged + 1
        self._num_before_age = 0 if is_aged else self._num_before_age + self._is_before_aged
        self._is_before_aged = False
        return is_aged

    def oldest_of_tenant(self, request: Request) -> Request | None:
        """Return the request that arrived first among the waiting requests of the same tenant and
        class, including this request; None if no other tenant waits in that class.
        """
        if self._num_queues[-request.spec.priority] < 2:
            return None
        return self._queues[request.spec.priority, request.tenant].oldest()

    def first(self, max_num: int) -> list[Request]:
        """Return up to `max_num` next requests in order, as if each prompt were added to its
        tenant's service before the next request is chosen.

        Ignores admissions by age, tenants under their share, and tokens generated meanwhile.
        """
        found: list[Request] = []
        service: dict[int, float] = {}
        for rank in self._ranks:
            if len(found) < max_num:
                found += self._first_of_class(rank, max_num - len(found), service)
        return found

    def _first_of_class(self, rank: int, max_num: int, service: dict[int, float]) -> list[Request]:
        """Return up to `max_num` next requests of a class.

        `service`: by tenant index, the service counter of each tenant that has requests in the list
        so far, with the prompts of these requests added; updated in place.
        """
        found: list[Request] = []
        turns: list[tuple[float, int, list[_ByDeadline]]] = []
        for queue in self._queues.values():
            if queue.priority == -rank and not self._tenants.is_at_limit(queue.tenant):
                live = (entry for entry in queue.by_deadline if entry[3] == entry[4].ticket)
                queued = heapq.nsmallest(max_num, live)[::-1]
                served = service.get(queue.tenant, float(self._tenants.service[queue.tenant]))
                turns.append((served, queue.turn_ticket, queued))
        heapq.heapify(turns)
        while turns and len(found) < max_num:
            served, ticket, queued = heapq.heappop(turns)
            request = queued.pop()[4]
            found.append(request)
            if not request.num_preemptions:
                served += len(request.tokens) * self._tenants.prompt_price(request.tenant)
            service[request.tenant] = served
            if queued:
                heapq.heappush(turns, (served, ticket, queued))
        return found

    def peek(self, now: float) -> Request | None:
        """Return the next admissible request that is not skipped; None if there is none."""
        if self._epoch != self._tenants.epoch:
            self._rebuild()
        self._aged = None
        self._is_before_aged = False
        if self._is_aging and self._num_since_aged + 1 >= self._stride and not self._skipped:
            queue = self._first_by_age(now)
            if queue is not None:
                front, oldest = self._front(queue), queue.oldest()
                if front is not None and front.num_preemptions and not oldest.num_preemptions:
                    return front
                self._aged = oldest
                return oldest
        return self._next_in_turn()

    def _next_in_turn(self) -> Request | None:
        for rank in self._ranks:
            queue = self._first_in_turn(rank)
            if queue is not None:
                return self._front(queue)
        return None

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the next request by class, tenant and deadline; None if an admission by age must
        come first or none is admissible.
        """
        if self._epoch != self._tenants.epoch:
            self._rebuild()
        self._aged = None
        is_age_due = self._is_aging and self._num_since_aged + 1 >= self._stride
        self._is_before_aged = is_age_due and self._first_by_age(now) is not None
        if self._is_before_aged and self._num_before_age >= self._stride:
            return None
        return self._next_in_turn()

    def skip(self, request: Request) -> None:
        """Skip a request that `peek` returned, until `end_round`."""
        self._skipped.add(request.ticket)
        queue = self._queues[request.spec.priority, request.tenant]
        queue.num_skipped += 1
        self._touched.append(queue)

    def end_round(self) -> None:
        """Put the skipped requests back, so that `peek` considers them again."""
        if not self._skipped:
            return
        for queue, entry in self._stash:
            heapq.heappush(queue.by_deadline, entry)
        for queue in self._touched:
            queue.num_skipped = 0
        for queue in self._left_out:
            if queue.num_requests and not queue.is_held_back:
                self._queue_turn(queue)
        for one in (self._stash, self._touched, self._left_out, self._skipped):
            one.clear()

    def release(self, tenant: int) -> None:
        """Make the queues of a tenant available again, if its running limit had excluded them."""
        for queue in self._held_back.pop(tenant, ()):
            queue.is_held_back = False
            if queue.num_requests:
                self._queue_turn(queue)
                if self._is_aging:
                    self._queue_age(queue, queue.oldest())

    def _open_class(self, rank: int) -> None:
        if rank not in self._turns:
            self._turns[rank] = []
            self._num_queues[rank] = 0
            insort(self._ranks, rank)
        self._num_queues[rank] += 1

    def _queue_turn(self, queue: _TenantQueue) -> None:
        queue.turn_ticket = next(self._tickets)
        service = float(self._tenants.service[queue.tenant])
        heapq.heappush(self._turns[-queue.priority], (service, queue.turn_ticket, queue))

    def _queue_age(self, queue: _TenantQueue, oldest: Request) -> None:
        queue.age_ticket = next(self._tickets)
        queue.age_key = self._age_key(queue, oldest)
        heapq.heappush(self._ages, (queue.age_key, queue.age_ticket, queue))

    def _age_key(self, queue: _TenantQueue, request: Request) -> float:
        return request.spec.arrival_s - queue.priority * self._aging_s

    def _front(self, queue: _TenantQueue) -> Request | None:
        """Return the first request of a queue by deadline, preempted requests first. Requests that
        were skipped are left out; None if all were skipped.
        """
        heap = queue.by_deadline
        while heap:
            entry = heap[0]
            if entry[3] != entry[4].ticket:
                heapq.heappop(heap)
            elif entry[3] in self._skipped:
                self._stash.append((queue, heapq.heappop(heap)))
            else:
                return entry[4]
        return None

    def _first_in_turn(self, rank: int) -> _TenantQueue | None:
        """Return the queue of the least served tenant of a class; None if no queue has an
        admissible request.
        """
        heap = self._turns[rank]
        while heap:
            service, ticket, queue = heap[0]
            if ticket != queue.turn_ticket:
                heapq.heappop(heap)
                continue
            if self._hold_back(queue):
                continue
            actual = float(self._tenants.service[queue.tenant])
            if service < actual:
                heapq.heapreplace(heap, (actual, ticket, queue))
            elif queue.num_skipped >= MAX_SKIPPED_PER_TENANT or self._front(queue) is None:
                queue.turn_ticket = -1
                self._left_out.append(queue)
            else:
                return queue
        return None

    def _first_by_age(self, now: float) -> _TenantQueue | None:
        """Return the queue with the smallest arrival - priority * aging_s, if its oldest request
        has waited for `aging_s`; else None.
        """
        heap = self._ages
        while heap:
            key, ticket, queue = heap[0]
            if ticket != queue.age_ticket:
                heapq.heappop(heap)
                continue
            if self._hold_back(queue):
                continue
            oldest = queue.oldest()
            actual = self._age_key(queue, oldest)
            if key < actual:
                queue.age_key = actual
                heapq.heapreplace(heap, (actual, ticket, queue))
                continue
            return queue if now - oldest.spec.arrival_s >= self._aging_s else None
        return None

    def _hold_back(self, queue: _TenantQueue) -> bool:
        """If the tenant of a queue is at its running limit, exclude the queue until the tenant is
        below the limit; return whether the queue was excluded.
        """
        if not self._tenants.is_at_limit(queue.tenant):
            return False
        queue.turn_ticket = queue.age_ticket = -1
        queue.age_key = math.inf
        queue.is_held_back = True
        self._held_back.setdefault(queue.tenant, []).append(queue)
        return True

    def _rebuild(self) -> None:
        """Rebuild the heaps: their keys are invalid after the service counters were rebased."""
        self._epoch = self._tenants.epoch
        for rank, heap in self._turns.items():
            self._turns[rank] = [
                (float(self._tenants.service[queue.tenant]), ticket, queue)
                for _, ticket, queue in heap
                if ticket == queue.turn_ticket
            ]
            heapq.heapify(self._turns[rank])
