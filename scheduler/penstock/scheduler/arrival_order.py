"""First come, first served: strict priority classes, arrival order inside a class.

Owns seniority and its heap. A preempted request keeps its sequence number and so its seniority.
Entries of removed requests are dropped when they reach the top.
"""

import heapq

from penstock.scheduler.request import Request


def seniority(request: Request) -> tuple[int, int]:
    """Sort key: smaller goes first and is preempted last."""
    return (-request.spec.priority, request.sequence)


class ArrivalOrder:
    """`Order` of waiting_queue.py by seniority."""

    def __init__(self) -> None:
        # Tickets are unique, so that requests themselves are never compared.
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._stash: list[tuple[tuple[int, int], int, Request]] = []
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        """Order a request that has just got its ticket."""
        self._num_requests += 1
        heapq.heappush(self._heap, (seniority(request), request.ticket, request))

    def discard(self, request: Request) -> None:  # noqa: ARG002 (the port's name)
        """Forget a request whose ticket was just taken."""
        self._num_requests -= 1
        # Cancelled requests deep in the heap would accumulate while the head waits.
        if len(self._heap) > 2 * self._num_requests + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def note_admission(self, request: Request) -> bool:  # noqa: ARG002 (the port's name)
        """A no-op: the order does not depend on admissions."""
        return False

    def eldest_beside(self, request: Request) -> Request | None:  # noqa: ARG002 (the port's name)
        """None: tenants have no turns."""
        return None

    def first(self, max_num: int) -> list[Request]:
        """The most senior, in order."""
        live = [entry[2] for entry in self._heap if entry[1] == entry[2].ticket]
        return heapq.nsmallest(max_num, live, key=seniority)

    def peek(self, now: float) -> Request | None:  # noqa: ARG002 (the port's name)
        """The most senior, None when none waits."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].ticket:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def peek_in_turn(self, now: float) -> Request | None:
        """The most senior: there are no turns."""
        return self.peek(now)

    def pass_over(self, request: Request) -> None:
        """Skip the head until `end_round`."""
        if self._heap[0][2] is not request:
            raise ValueError("only the head can be passed over")
        self._stash.append(heapq.heappop(self._heap))

    def end_round(self) -> None:
        """Skipped requests return to their places."""
        for entry in self._stash:
            heapq.heappush(self._heap, entry)
        self._stash.clear()

    def release(self, tenant: int) -> None:
        """A no-op: this order has no limits per tenant."""
