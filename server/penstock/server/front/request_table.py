"""Indexes the live requests of a front (gRPC server process) by id and by key.

A key is the number of an output in the engine. This module also assigns the keys. Ids are per
tenant: two tenants may use the same id. Only `remove` removes a request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from penstock.server.front.errors import ErrorReason, request_error
from penstock.server.front.live_request import LiveRequest, LiveRequestOutput
from penstock.server.observe.frames import FrontRequestView

MIN_UNREAD_S: Final = 1.0
"""Seconds after its end for which a request is considered as still being read."""
_SEARCH_INTERVAL_S: Final = 0.1
_NUM_COUNTER_BITS = 32


class RequestTable:
    """The live requests of one front: at most `max_live_requests`, and at most seven eighths of
    them per tenant.

    A request that has ended in the engine and is not read yet counts towards these limits, but not
    towards the quotas of its tenant. It stays here until it is read, until its reader has stalled
    for too long, or until its place is needed for another request. `find_output` is `output`
    without the cost of a method call.
    """

    def __init__(self, front_id: int, max_live_requests: int) -> None:
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        self._by_key: dict[int, LiveRequestOutput] = {}
        # A bound method of the dictionary, because it is called for every token.
        self.find_output: Callable[[int], LiveRequestOutput | None] = self._by_key.get
        self._first_key = front_id << _NUM_COUNTER_BITS
        self._counter = 0
        self._num_of_tenant: Counter[str] = Counter()
        self._max_live_requests = max_live_requests
        self._max_of_tenant = max_live_requests - max_live_requests // 8
        self._searched_s = -math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over a snapshot, so that requests may be removed during the iteration."""
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: str, tenant: str) -> LiveRequest | None:
        """Return the live request of this id and tenant, or None."""
        return self._by_id.get((tenant, request_id))

    def output(self, key: int) -> "LiveRequestOutput | None":
        """Return the output of this key, or None if its request is not live."""
        return self.find_output(key)

    def new_keys(self, num_keys: int) -> tuple[int, ...]:
        """Return `num_keys` keys that no live output uses."""
        keys: list[int] = []
        while len(keys) < num_keys:
            self._counter = self._counter % (2**_NUM_COUNTER_BITS - 1) + 1
            key = self._first_key | self._counter
            if key not in self._by_key:
                keys.append(key)
        return tuple(keys)

    @property
    def is_full(self) -> bool:
        """True if no more requests of any tenant can be added."""
        return len(self._by_id) >= self._max_live_requests

    def unread(self, now_s: float) -> list[LiveRequest]:
        """Return ended requests that have been unread for more than `MIN_UNREAD_S`, of the tenant
        with the most of them.

        Returns an empty list within `_SEARCH_INTERVAL_S` of the last search, because rejecting a
        request must cost less than serving one.
        """
        if now_s < self._searched_s + _SEARCH_INTERVAL_S:
            return []
        self._searched_s = now_s
        by_tenant: dict[str, list[LiveRequest]] = {}
        for request in self._by_id.values():
            if request.is_unread_since(now_s - MIN_UNREAD_S):
                by_tenant.setdefault(request.tenant, []).append(request)
        return max(by_tenant.values(), key=len) if by_tenant else []

    def add(self, request: LiveRequest) -> None:
        """Add a request under its id. Raises RequestError if the id is in use, or if the front or
        the tenant's share of it is full."""
        tenant = request.tenant
        if (tenant, request.request_id) in self._by_id:
            raise request_error(ErrorReason.REQUEST_ID_IN_USE)
        limit = f"max_live_requests is {self._max_live_requests}"
        if self.is_full:
            raise request_error(ErrorReason.QUEUE_FULL, f"the front is full: {limit}")
        if self._num_of_tenant[tenant] >= self._max_of_tenant:
            part = f"{self._max_of_tenant} of them, unread ones included, are of one tenant"
            raise request_error(ErrorReason.QUEUE_FULL, f"the front is full: {limit}, and {part}")
        self._num_of_tenant[tenant] += 1
        self._by_id[tenant, request.request_id] = request

    def add_outputs(self, request: LiveRequest) -> None:
        """Add the outputs of a started request to the index by key."""
        for output in request.outputs:
            self._by_key[output.key] = output

    def remove_outputs(self, request: LiveRequest) -> None:
        """Remove the outputs of a request from the index by key. Idempotent."""
        for output in request.outputs:
            self._by_key.pop(output.key, None)

    def owns_keys(self, request: LiveRequest) -> bool:
        """Return True if this front has assigned the keys of all live outputs of the request, and
        False if another front has submitted the request."""
        first = self._first_key
        return all(first < key <= first + 2**_NUM_COUNTER_BITS - 1 for key in request.live_keys)

    def renew_keys(self, request: LiveRequest) -> None:
        """Assign new keys to the live outputs. Later events for the old keys are ignored."""
        outputs = [output for output in request.outputs if output.is_live]
        for output, key in zip(outputs, self.new_keys(len(outputs)), strict=True):
            del self._by_key[output.key]
            output.key = key
            self._by_key[key] = output

    def remove(self, request: LiveRequest) -> None:
        """Remove the request and its outputs. Idempotent."""
        if self.get(request.request_id, request.tenant) is request:
            del self._by_id[request.tenant, request.request_id]
            self._num_of_tenant[request.tenant] -= 1
            if not self._num_of_tenant[request.tenant]:
                del self._num_of_tenant[request.tenant]
        self.remove_outputs(request)


def view_of(request: LiveRequest, front_id: int) -> FrontRequestView:
    """Return the current state of `request` as operators see it (ListLiveRequests)."""
    segments = request.phases.segments
    return FrontRequestView(
        front_id=front_id,
        keys=tuple(output.key for output in request.outputs),
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.generation.urgency.priority,
        trace_id=request.trace_id.hex(),
        arrival_s=request.arrival_s,
        phase=segments[-1].kind,
        history=tuple((segment.kind, segment.start_s) for segment in segments),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        num_backlog_tokens=request.stream.num_backlog_tokens,
    )
