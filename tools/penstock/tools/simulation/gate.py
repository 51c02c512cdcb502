"""Holds requests back in front of the engine, to simulate static and dynamic batching.

Static batching waits for a full batch and runs it to its end before the next one starts. Dynamic
batching does the same, but waits for a limited time. Both use the production engine, which releases
each finished request at once and does not pad, so the results are better than those of real servers
with these policies.
"""

import math
from collections import deque
from typing import Protocol

from penstock.scheduler.request import RequestSpec


class Gate(Protocol):
    """Interface of the classes that hold requests back. Times are seconds on the engine's clock."""

    def offer(self, spec: RequestSpec) -> None:
        """Add an arrived request."""
        ...

    def close(self) -> None:
        """Record that no more requests will arrive."""
        ...

    def admit(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """Return the requests to admit now; `is_idle`: the engine has no work."""
        ...

    def next_opening_s(self) -> float:
        """Return when `admit` would admit a request to an idle engine: minus infinity for now,
        infinity if this depends on further arrivals.
        """
        ...

    def __len__(self) -> int:
        """Return the number of requests held back."""
        ...


class OpenGate:
    """Admits all requests immediately: the engine's scheduler queues and batches them (in-flight
    batching).
    """

    def __init__(self) -> None:
        self._arrived: list[RequestSpec] = []

    def offer(self, spec: RequestSpec) -> None:
        """Add an arrived request."""
        self._arrived.append(spec)

    def close(self) -> None:
        """Do nothing: requests are admitted immediately."""

    def admit(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """Return all arrived requests."""
        del now_s, is_idle
        arrived, self._arrived = self._arrived, []
        return arrived

    def next_opening_s(self) -> float:
        """Return minus infinity if a request is held, otherwise infinity."""
        return -math.inf if self._arrived else math.inf

    def __len__(self) -> int:
        return len(self._arrived)


class BatchGate:
    """Admits up to `batch_size` requests to an idle engine, as one batch.

    It opens when `batch_size` requests wait, when the first has waited `max_wait_s` (infinite for
    static batching), or when no more requests will arrive.
    """

    def __init__(self, *, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._waiting: deque[RequestSpec] = deque()
        self._is_closed = False

    def offer(self, spec: RequestSpec) -> None:
        """Add an arrived request."""
        self._waiting.append(spec)

    def close(self) -> None:
        """Record that no more requests will arrive: the remaining ones are admitted without
        waiting.
        """
        self._is_closed = True

    def admit(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """Return the next batch if the gate is open and the engine idle, else an empty list."""
        if not (is_idle and now_s >= self.next_opening_s()):
            return []
        num = min(self._batch_size, len(self._waiting))
        return [self._waiting.popleft() for _ in range(num)]

    def next_opening_s(self) -> float:
        """Return when the gate opens, seconds on the engine's clock: minus infinity if it is open,
        infinity if this depends on further arrivals.
        """
        if not self._waiting:
            return math.inf
        if self._is_closed or len(self._waiting) >= self._batch_size:
            return -math.inf
        return self._waiting[0].arrival_s + self._max_wait_s

    def __len__(self) -> int:
        return len(self._waiting)
