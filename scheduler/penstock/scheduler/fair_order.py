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
  one with the least arrival - priority * aging_s. If age always decided, a tenant that floods the
  engine would outrank all others as soon as its queue is long. So age decides only one in
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

Every heap drops stale entries when they reach the top and corrects keys that have only grown, so a
call costs as much as a heap operation, however many requests wait.
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

MAX_PASSED_PER_LINE = 4
"""Requests of one tenant that are skipped (`pass_over`) before those of the next tenant are tried.
"""

# Keys: is new, due time, sequence, ticket; and arrival, sequence, ticket. Tickets are unique, so
# requests themselves are never compared.
_ByDeadline: TypeAlias = tuple[bool, float, int, int, Request]
_ByArrival: TypeAlias = tuple[float, int, int, Request]


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting requests of one tenant in one class (a line).

    `turn_ticket` and `age_ticket` identify its valid entries in the two heaps of lines; -1 for
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
    num_passed: int = 0
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
        self._lines: dict[tuple[int, int], _Line] = {}
        # Negated priorities of the classes that have lines, most urgent first.
        self._ranks: list[int] = []
        # By negated priority: (service, ticket, line), and the number of live lines.
        self._turns: dict[int, list[tuple[float, int, _Line]]] = {}
        self._num_lines: dict[int, int] = {}
        self._ages: list[tuple[float, int, _Line]] = []
        self._held_back: dict[int, list[_Line]] = {}
        self._tickets = itertools.count()
        self._epoch = tenants.epoch
        self._num_requests = 0
        self._num_since_aged = 0
        # Number of requests admitted in fair order while an admission by age was due.
        self._num_before_age = 0
        self._goes_before_age = False
        self._aged: Request | None = None
        self._passed: set[int] = set()
        self._stash: list[tuple[_Line, _ByDeadline]] = []
        self._touched: list[_Line] = []
        self._left_out: list[_Line] = []

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        """Add a request, whose `ticket` was just set."""
        spec = request.spec
        key = (spec.priority, request.tenant)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(*key)
            self._open_class(-spec.priority)
            self._queue_turn(line)
        due_s = min(request.expiry_s, spec.arrival_s + self._aging_s)
        is_fresh = request.num_preemptions == 0
        heapq.heappush(
            line.by_deadline, (is_fresh, due_s, request.sequence, request.ticket, request)
        )
        line.num_requests += 1
        self._num_requests += 1
        heapq.heappush(line.by_arrival, (spec.arrival_s, request.sequence, request.ticket, request))
        # If the oldest arrival became later, the entry is corrected when it reaches the top; if it
        # became earlier, a new entry is pushed now.
        is_earlier = self._is_aging and self._age_key(line, request) < line.age_key
        if is_earlier and not line.is_held_back:
            self._queue_age(line, request)

    def discard(self, request: Request) -> None:
        """Remove a request, whose `ticket` was just cleared."""
        line = self._lines[request.spec.priority, request.tenant]
        line.num_requests -= 1
        self._num_requests -= 1
        if self._aged is request:
            self._aged = None
        if line.num_requests:
            line.compact()
            return
        del self._lines[line.priority, line.tenant]
        if line.is_held_back:
            self._held_back[line.tenant].remove(line)
        line.turn_ticket = line.age_ticket = -1
        rank = -line.priority
        self._num_lines[rank] -= 1
        if not self._num_lines[rank]:
            self._ranks.remove(rank)
            del self._num_lines[rank], self._turns[rank]
        elif len(self._turns[rank]) > 2 * self._num_lines[rank] + 64:
            self._turns[rank] = [e for e in self._turns[rank] if e[1] == e[2].turn_ticket]
            heapq.heapify(self._turns[rank])
        if len(self._ages) > 2 * len(self._lines) + 64:
            self._ages = [e for e in self._ages if e[1] == e[2].age_ticket]
            heapq.heapify(self._ages)

    def note_admission(self, request: Request) -> bool:
        """Record an admission; return whether it was decided by age."""
        is_aged = request is self._aged
        self._num_since_aged = 0 if is_aged else self._num_since_aged + 1
        self._num_before_age = 0 if is_aged else self._num_before_age + self._goes_before_age
        self._goes_before_age = False
        return is_aged

    def oldest_of_tenant(self, request: Request) -> Request | None:
        """Return the earliest arrival among the waiting requests of the same tenant and class,
        itself included; None if no other tenant waits in that class.
        """
        if self._num_lines[-request.spec.priority] < 2:
            return None
        return self._lines[request.spec.priority, request.tenant].oldest()

    def first(self, max_num: int) -> list[Request]:
        """Return the next requests in order, as if each prompt were added to its tenant's service
        before the next request is chosen.

        Ignores admissions by age, tenants under their share, and tokens generated meanwhile.
        """
        found: list[Request] = []
        service: dict[int, float] = {}
        for rank in self._ranks:
            if len(found) < max_num:
                found += self._first_of_class(rank, max_num - len(found), service)
        return found

    def _first_of_class(self, rank: int, max_num: int, service: dict[int, float]) -> list[Request]:
        """Return the next requests of a class. `service`: counters of the tenants already charged
        for this list, updated in place.
        """
        found: list[Request] = []
        turns: list[tuple[float, int, list[_ByDeadline]]] = []
        for line in self._lines.values():
            if line.priority == -rank and not self._tenants.is_at_limit(line.tenant):
                live = (entry for entry in line.by_deadline if entry[3] == entry[4].ticket)
                lined_up = heapq.nsmallest(max_num, live)[::-1]
                served = service.get(line.tenant, float(self._tenants.service[line.tenant]))
                turns.append((served, line.turn_ticket, lined_up))
        heapq.heapify(turns)
        while turns and len(found) < max_num:
            served, ticket, lined_up = heapq.heappop(turns)
            request = lined_up.pop()[4]
            found.append(request)
            if not request.num_preemptions:
                served += len(request.tokens) * self._tenants.prompt_price(request.tenant)
            service[request.tenant] = served
            if lined_up:
                heapq.heappush(turns, (served, ticket, lined_up))
        return found

    def peek(self, now: float) -> Request | None:
        """Return the next admissible request that is not skipped; None if there is none."""
        if self._epoch != self._tenants.epoch:
            self._rebuild()
        self._aged = None
        self._goes_before_age = False
        if self._is_aging and self._num_since_aged + 1 >= self._stride and not self._passed:
            line = self._first_by_age(now)
            if line is not None:
                front, oldest = self._front(line), line.oldest()
                if front is not None and front.num_preemptions and not oldest.num_preemptions:
                    return front
                self._aged = oldest
                return oldest
        return self._next_in_turn()

    def _next_in_turn(self) -> Request | None:
        for rank in self._ranks:
            line = self._first_in_turn(rank)
            if line is not None:
                return self._front(line)
        return None

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the next request by class, tenant and deadline; None if an admission by age must
        come first or none is admissible.
        """
        if self._epoch != self._tenants.epoch:
            self._rebuild()
        self._aged = None
        is_age_due = self._is_aging and self._num_since_aged + 1 >= self._stride
        self._goes_before_age = is_age_due and self._first_by_age(now) is not None
        if self._goes_before_age and self._num_before_age >= self._stride:
            return None
        return self._next_in_turn()

    def pass_over(self, request: Request) -> None:
        """Skip a request that `peek` returned, until `end_round`."""
        self._passed.add(request.ticket)
        line = self._lines[request.spec.priority, request.tenant]
        line.num_passed += 1
        self._touched.append(line)

    def end_round(self) -> None:
        """Put skipped requests back in their places."""
        if not self._passed:
            return
        for line, entry in self._stash:
            heapq.heappush(line.by_deadline, entry)
        for line in self._touched:
            line.num_passed = 0
        for line in self._left_out:
            if line.num_requests and not line.is_held_back:
                self._queue_turn(line)
        for one in (self._stash, self._touched, self._left_out, self._passed):
            one.clear()

    def release(self, tenant: int) -> None:
        """Make the lines (`_Line`) of a tenant available again, if its running limit had excluded
        them.
        """
        for line in self._held_back.pop(tenant, ()):
            line.is_held_back = False
            if line.num_requests:
                self._queue_turn(line)
                if self._is_aging:
                    self._queue_age(line, line.oldest())

    def _open_class(self, rank: int) -> None:
        if rank not in self._turns:
            self._turns[rank] = []
            self._num_lines[rank] = 0
            insort(self._ranks, rank)
        self._num_lines[rank] += 1

    def _queue_turn(self, line: _Line) -> None:
        line.turn_ticket = next(self._tickets)
        service = float(self._tenants.service[line.tenant])
        heapq.heappush(self._turns[-line.priority], (service, line.turn_ticket, line))

    def _queue_age(self, line: _Line, oldest: Request) -> None:
        line.age_ticket = next(self._tickets)
        line.age_key = self._age_key(line, oldest)
        heapq.heappush(self._ages, (line.age_key, line.age_ticket, line))

    def _age_key(self, line: _Line, request: Request) -> float:
        return request.spec.arrival_s - line.priority * self._aging_s

    def _front(self, line: _Line) -> Request | None:
        """Return the first request of a line (`_Line`) by deadline, preempted ones first, without
        those that were skipped; None if all were.
        """
        heap = line.by_deadline
        while heap:
            entry = heap[0]
            if entry[3] != entry[4].ticket:
                heapq.heappop(heap)
            elif entry[3] in self._passed:
                self._stash.append((line, heapq.heappop(heap)))
            else:
                return entry[4]
        return None

    def _first_in_turn(self, rank: int) -> _Line | None:
        """Return the line (`_Line`) of the least served tenant of a class; None if no line has an
        admissible request.
        """
        heap = self._turns[rank]
        while heap:
            service, ticket, line = heap[0]
            if ticket != line.turn_ticket:
                heapq.heappop(heap)
                continue
            if self._hold_back(line):
                continue
            actual = float(self._tenants.service[line.tenant])
            if service < actual:
                heapq.heapreplace(heap, (actual, ticket, line))
            elif line.num_passed >= MAX_PASSED_PER_LINE or self._front(line) is None:
                line.turn_ticket = -1
                self._left_out.append(line)
            else:
                return line
        return None

    def _first_by_age(self, now: float) -> _Line | None:
        """Return the line (`_Line`) with the smallest arrival - priority * aging_s, if its oldest
        request has waited for `aging_s`; else None.
        """
        heap = self._ages
        while heap:
            key, ticket, line = heap[0]
            if ticket != line.age_ticket:
                heapq.heappop(heap)
                continue
            if self._hold_back(line):
                continue
            oldest = line.oldest()
            actual = self._age_key(line, oldest)
            if key < actual:
                line.age_key = actual
                heapq.heapreplace(heap, (actual, ticket, line))
                continue
            return line if now - oldest.spec.arrival_s >= self._aging_s else None
        return None

    def _hold_back(self, line: _Line) -> bool:
        """If the tenant of a line is at its running limit, exclude the line until it is below;
        return whether it was excluded.
        """
        if not self._tenants.is_at_limit(line.tenant):
            return False
        line.turn_ticket = line.age_ticket = -1
        line.age_key = math.inf
        line.is_held_back = True
        self._held_back.setdefault(line.tenant, []).append(line)
        return True

    def _rebuild(self) -> None:
        """Rebuild the heaps: their keys are invalid after the service counters were rebased."""
        self._epoch = self._tenants.epoch
        for rank, heap in self._turns.items():
            self._turns[rank] = [
                (float(self._tenants.service[line.tenant]), ticket, line)
                for _, ticket, line in heap
                if ticket == line.turn_ticket
            ]
            heapq.heapify(self._turns[rank])
