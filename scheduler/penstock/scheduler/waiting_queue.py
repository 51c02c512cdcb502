"""Requests that wait: strict priority classes, first come first served inside a class.

Owns the order, the bounds' counters and the expiry times of PENDING requests. A preempted request
comes back with its old sequence number and so keeps its seniority. Outputs of one request wait
beside the queue (`hold`) until their leader's prompt is computed and can be shared.

Both heaps drop stale entries lazily: an entry is live while its request is PENDING and knows it is
waiting.
"""

import heapq
import itertools
from collections.abc import Iterator

from penstock.scheduler.request import NO_TIME, Request


def seniority(request: Request) -> tuple[int, int]:
    """Sort key: smaller goes first and is preempted last."""
    return (-request.spec.priority, request.sequence)


def expiry_s(request: Request) -> float:
    """When a request that still waits is no longer worth running, engine clock."""
    spec = request.spec
    ttft = spec.ttft_deadline_s if request.first_token_s == NO_TIME else NO_TIME
    return min(spec.deadline_s, spec.time_limit_s, ttft)


class WaitingQueue:
    """Ordered PENDING requests; `num_tokens` counts the tokens they would prefill."""

    def __init__(self) -> None:
        # The counter breaks ties, so that requests themselves are never compared.
        self._ticket = itertools.count()
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._expiries: list[tuple[float, int, Request]] = []
        self._held: dict[int, list[Request]] = {}
        self._members: dict[int, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.spec.key) is request

    def push(self, request: Request) -> None:
        """Queue a request by its seniority."""
        self._join(request)
        self._enter(request)

    def hold(self, request: Request, leader_key: int) -> None:
        """Let a request wait until `release_held(leader_key)`."""
        self._join(request)
        self._held.setdefault(leader_key, []).append(request)

    def release_held(self, leader_key: int) -> None:
        """The leader's prompt is computed: its followers enter the queue."""
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

    def peek(self) -> Request | None:
        """The request that goes next, None when nobody may."""
        while self._heap and self._heap[0][2] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._members[request.spec.key]
        self.num_tokens -= len(request.tokens)
        self._compact()

    def expired(self, now: float) -> list[Request]:
        """Waiting requests whose expiry is at or before `now`; each is told once, then removed."""
        found: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now:
            request = heapq.heappop(self._expiries)[2]
            # A time to first token that was met leaves its entry behind.
            if request in self and expiry_s(request) <= now and request not in found:
                found.append(request)
        return found

    def next_expiry_s(self) -> float:
        """Earliest expiry of a waiting request, NO_TIME when none has one."""
        while self._expiries and self._expiries[0][2] not in self:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else NO_TIME

    def _join(self, request: Request) -> None:
        self._members[request.spec.key] = request
        self.num_tokens += len(request.tokens)
        at_s = expiry_s(request)
        if at_s != NO_TIME:
            heapq.heappush(self._expiries, (at_s, next(self._ticket), request))

    def _enter(self, request: Request) -> None:
        heapq.heappush(self._heap, (seniority(request), next(self._ticket), request))

    def _compact(self) -> None:
        # Cancelled requests deep in a heap would pile up while the head waits.
        limit = 2 * len(self._members) + 64
        if len(self._heap) > limit:
            self._heap = [entry for entry in self._heap if entry[2] in self]
            heapq.heapify(self._heap)
        if len(self._expiries) > limit:
            self._expiries = [entry for entry in self._expiries if entry[2] in self]
            heapq.heapify(self._expiries)
