"""The live requests of a front, by id and by key.

Owns the two indexes and the keys. Ids are per tenant: another tenant may use the same id. Only
`remove` removes a request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from penstock.server.front.errors import ErrorReason, refuse
from penstock.server.front.live_request import LiveRequest, OwnOutput
from penstock.server.observe.frames import FrontView

MIN_UNREAD_S: Final = 1.0
"""A reader that reads an ended request at all has read it by then."""
_SEARCH_INTERVAL_S: Final = 0.1
_NUM_COUNTER_BITS = 32


class RequestTable:
    """Live requests of one front, at most `max_live_requests`; no tenant may use the last eighth
    (rounded down). A request that ended at the engine and is not yet read counts against no quota,
    but it stays here until it is read, its reader counts as stalled, or others need its place.

    `find_output`: returns the output of a key, if its request is live.
    """

    def __init__(self, front_id: int, max_live_requests: int) -> None:
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        self._by_key: dict[int, OwnOutput] = {}
        # The dictionary's own method: it is called for every token.
        self.find_output: Callable[[int], OwnOutput | None] = self._by_key.get
        self._first_key = front_id << _NUM_COUNTER_BITS
        self._counter = 0
        self._num_of_tenant: Counter[str] = Counter()
        self._max_live_requests = max_live_requests
        self._max_of_tenant = max_live_requests - max_live_requests // 8
        self._searched_s = -math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over a snapshot, so that requests may be removed during the loop."""
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: str, tenant: str) -> LiveRequest | None:
        """Return the live request of this id and tenant."""
        return self._by_id.get((tenant, request_id))

    def output(self, key: int) -> "OwnOutput | None":
        """Return the output of this key, if its request is live."""
        return self.find_output(key)

    def new_keys(self, num_keys: int) -> tuple[int, ...]:
        """Return keys that no live output has."""
        keys: list[int] = []
        while len(keys) < num_keys:
            self._counter = self._counter % (2**_NUM_COUNTER_BITS - 1) + 1
            key = self._first_key | self._counter
            if key not in self._by_key:
                keys.append(key)
        return tuple(keys)

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another request."""
        return len(self._by_id) >= self._max_live_requests

    def unread(self, now_s: float) -> list[LiveRequest]:
        """Return the ended requests unread after `MIN_UNREAD_S`, of the tenant with most of them.

        None within `_SEARCH_INTERVAL_S` of the last search: refusing must be cheaper than serving.
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
        """Reserve the id. Raises RequestError if it is in use, or if the front or the tenant's part
        of it is full.
        """
        tenant = request.tenant
        if (tenant, request.request_id) in self._by_id:
            raise refuse(ErrorReason.REQUEST_ID_IN_USE)
        limit = f"max_live_requests is {self._max_live_requests}"
        if self.is_full:
            raise refuse(ErrorReason.QUEUE_FULL, f"the front is full: {limit}")
        if self._num_of_tenant[tenant] >= self._max_of_tenant:
            part = f"{self._max_of_tenant} of them, unread ones included, are of one tenant"
            raise refuse(ErrorReason.QUEUE_FULL, f"the front is full: {limit}, and {part}")
        self._num_of_tenant[tenant] += 1
        self._by_id[tenant, request.request_id] = request

    def add_outputs(self, request: LiveRequest) -> None:
        """Make the outputs of a started request findable by key."""
        for output in request.outputs:
            self._by_key[output.key] = output

    def remove_outputs(self, request: LiveRequest) -> None:
        """Remove a request's outputs from the index by key. Idempotent."""
        for output in request.outputs:
            self._by_key.pop(output.key, None)

    def owns_keys(self, request: LiveRequest) -> bool:
        """Return whether all its keys are this front's, not those of another that submitted it."""
        first = self._first_key
        return all(first < key <= first + 2**_NUM_COUNTER_BITS - 1 for key in request.live_keys)

    def renew_keys(self, request: LiveRequest) -> None:
        """Give the live outputs new keys; events for the old keys are late."""
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


def view_of(request: LiveRequest, front_id: int) -> FrontView:
    """Return the current view of `request`."""
    segments = request.phases.segments
    return FrontView(
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
