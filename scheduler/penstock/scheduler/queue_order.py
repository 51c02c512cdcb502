"""The order of the queue: its interface, and first come, first served.

Owns the interface and the plain order: strict priority classes, arrival order inside a class. A
preempted request keeps its sequence number and so its seniority. Entries of removed requests are
dropped when they reach the top.
"""

import heapq
from typing import Protocol

from penstock.scheduler.request import Request


class QueueOrder(Protocol):
    """Orders requests that have a ticket. No call costs more than a heap operation."""

    def __len__(self) -> int:
        """Return the number of requests in the order."""
        ...

    def push(self, request: Request) -> None:
        """Add a request that has just got its ticket."""
        ...

    def discard(self, request: Request) -> None:
        """Remove a request whose ticket was just taken."""
        ...

    def note_admission(self, request: Request) -> bool:
        """Record that a request, which still has a ticket, is about to be admitted; return whether
        only its age decided.
        """
        ...

    def eldest_beside(self, request: Request) -> Request | None:
        """Return the eldest of the requests that wait in its class for its tenant, itself included.

        None if no other tenant waits there, or tenants do not alternate.
        """
        ...

    def first(self, max_num: int) -> list[Request]:
        """Return the next requests if nothing changes, at most `max_num`; slow, for operators.

        Excludes requests of tenants at their running limit. Changes nothing.
        """
        ...

    def peek(self, now: float) -> Request | None:
        """Return the next request, None if none is admissible."""
        ...

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the next request, regardless of age; None if an admission by age is overdue."""
        ...

    def pass_over(self, request: Request) -> None:
        """Skip the request that `peek` returned until `end_round`."""
        ...

    def end_round(self) -> None:
        """Return skipped requests to their places."""
        ...

    def release(self, tenant: int) -> None:
        """Record that a request of a tenant at its running limit has ended."""
        ...


class ArrivalOrder:
    """`QueueOrder` by arrival time (first come, first served)."""

    def __init__(self) -> None:
        # Tickets are unique, so that requests themselves are never compared.
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._stash: list[tuple[tuple[int, int], int, Request]] = []
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        """Add a request that has just got its ticket."""
        self._num_requests += 1
        heapq.heappush(self._heap, (request.seniority, request.ticket, request))

    def discard(self, request: Request) -> None:  # noqa: ARG002 (the port's name)
        """Remove a request whose ticket was just taken."""
        self._num_requests -= 1
        # Cancelled requests deep in the heap would accumulate while the head waits.
        if len(self._heap) > 2 * self._num_requests + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def note_admission(self, request: Request) -> bool:  # noqa: ARG002 (the port's name)
        """A no-op: the order does not depend on admissions."""
        return False

    def eldest_beside(self, request: Request) -> Request | None:  # noqa: ARG002 (the port's name)
        """Return None: tenants do not alternate."""
        return None

    def first(self, max_num: int) -> list[Request]:
        """Return the most senior requests, in order."""
        live = [entry[2] for entry in self._heap if entry[1] == entry[2].ticket]
        return heapq.nsmallest(max_num, live, key=lambda request: request.seniority)

    def peek(self, now: float) -> Request | None:  # noqa: ARG002 (the port's name)
        """Return the most senior request, None if none waits."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].ticket:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the most senior request."""
        return self.peek(now)

    def pass_over(self, request: Request) -> None:
        """Skip the head until `end_round`."""
        if self._heap[0][2] is not request:
            raise ValueError("only the head can be passed over")
        self._stash.append(heapq.heappop(self._heap))

    def end_round(self) -> None:
        """Return skipped requests to their places."""
        for entry in self._stash:
            heapq.heappush(self._heap, entry)
        self._stash.clear()

    def release(self, tenant: int) -> None:
        """A no-op: this order has no limits per tenant."""
