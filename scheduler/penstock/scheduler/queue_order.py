"""The interface of a queue order, and the plain order: first come, first served.

The plain order has strict priority classes, and arrival order inside a class. A preempted request
keeps its sequence number and therefore its place (see `Request.seniority`). Heap entries of removed
requests are dropped when they reach the top.
"""

import heapq
from typing import Protocol

from penstock.scheduler.request import Request


class QueueOrder(Protocol):
    """Orders the waiting requests that may be admitted. On average, every call except `first` costs
    a few heap operations.
    """

    def __len__(self) -> int:
        """Return the number of requests in the order."""
        ...

    def push(self, request: Request) -> None:
        """Add a request. The caller has set its `ticket`."""
        ...

    def discard(self, request: Request) -> None:
        """Remove a request. The caller has set its `ticket` to -1."""
        ...

    def note_admission(self, request: Request) -> bool:
        """Record that a request is about to be admitted, before its `ticket` is cleared; return
        whether it was chosen by age.
        """
        ...

    def oldest_of_tenant(self, request: Request) -> Request | None:
        """Return the request that arrived first among the waiting requests of the same class and
        tenant, including this request.

        None if no other tenant waits in that class, or if the order does not alternate between
        tenants.
        """
        ...

    def first(self, max_num: int) -> list[Request]:
        """Return the next requests, at most `max_num`, as they would be admitted if nothing
        changed; slow, for operators.

        Excludes requests of tenants at their running limit. Changes nothing.
        """
        ...

    def peek(self, now: float) -> Request | None:
        """Return the next admissible request that is not skipped; None if there is none."""
        ...

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the next request, regardless of age; None if none is admissible or an admission by
        age is overdue.
        """
        ...

    def skip(self, request: Request) -> None:
        """Skip a request that `peek` returned, until `end_round`."""
        ...

    def end_round(self) -> None:
        """Put the skipped requests back, so that `peek` considers them again."""
        ...

    def release(self, tenant: int) -> None:
        """Record that a request of a tenant at its running limit has left its slot."""
        ...


class ArrivalOrder:
    """`QueueOrder` by priority class, then arrival (first come, first served)."""

    def __init__(self) -> None:
        # Tickets are unique, so that requests themselves are never compared.
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._stash: list[tuple[tuple[int, int], int, Request]] = []
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        """Add a request. The caller has set its `ticket`."""
        self._num_requests += 1
        heapq.heappush(self._heap, (request.seniority, request.ticket, request))

    def discard(self, request: Request) -> None:  # noqa: ARG002 (the interface's name)
        """Remove a request. The caller has set its `ticket` to -1."""
        self._num_requests -= 1
        # Rebuild: cancelled requests deep in the heap would accumulate while the head waits.
        if len(self._heap) > 2 * self._num_requests + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def note_admission(self, request: Request) -> bool:  # noqa: ARG002 (the interface's name)
        """Return False: this order never chooses by age, and does not depend on admissions."""
        return False

    def oldest_of_tenant(self, request: Request) -> Request | None:  # noqa: ARG002 (the interface's name)
        """Return None: this order does not alternate between tenants."""
        return None

    def first(self, max_num: int) -> list[Request]:
        """Return up to `max_num` requests, the most senior first."""
        live = [entry[2] for entry in self._heap if entry[1] == entry[2].ticket]
        return heapq.nsmallest(max_num, live, key=lambda request: request.seniority)

    def peek(self, now: float) -> Request | None:  # noqa: ARG002 (the interface's name)
        """Return the most senior request, None if none waits."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].ticket:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def peek_in_turn(self, now: float) -> Request | None:
        """Return the most senior request, None if none waits."""
        return self.peek(now)

    def skip(self, request: Request) -> None:
        """Skip the head until `end_round`; raise ValueError for another request."""
        if self._heap[0][2] is not request:
            raise ValueError("only the head can be passed over")
        self._stash.append(heapq.heappop(self._heap))

    def end_round(self) -> None:
        """Put the skipped requests back, so that `peek` considers them again."""
        for entry in self._stash:
            heapq.heappush(self._heap, entry)
        self._stash.clear()

    def release(self, tenant: int) -> None:
        """Do nothing: this order has no limits per tenant."""
