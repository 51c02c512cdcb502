"""Admission to the engine: the only difference between in-flight, static and dynamic batching.

Owns the requests that a batching server holds back from the engine. Static batching waits for a
full batch and runs it to its end before the next; dynamic batching does the same but waits for a
limited time only. The engine is the production one and releases finished requests early, which
favours both policies: nothing is padded.
"""

import math
from collections import deque
from typing import Protocol

from penstock.scheduler.request import RequestSpec


class Gate(Protocol):
    """Holds requests back. Times are seconds on the engine's clock."""

    def offer(self, spec: RequestSpec) -> None:
        """Add an arrived request."""
        ...

    def close(self) -> None:
        """Expect no more requests."""
        ...

    def let_in(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """Return the requests to admit now; `is_idle`: the engine has nothing to do."""
        ...

    def next_opening_s(self) -> float:
        """Return when `let_in` would admit a request to an idle engine; infinite when unknown."""
        ...

    def __len__(self) -> int:
        """Return the number of requests held back."""
        ...


class OpenGate:
    """Admits all requests at once: in-flight batching with the queue of the scheduler."""

    def __init__(self) -> None:
        self._arrived: list[RequestSpec] = []

    def offer(self, spec: RequestSpec) -> None:
        """See `Gate`."""
        self._arrived.append(spec)

    def close(self) -> None:
        """See `Gate`."""

    def let_in(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """See `Gate`."""
        del now_s, is_idle
        arrived, self._arrived = self._arrived, []
        return arrived

    def next_opening_s(self) -> float:
        """See `Gate`."""
        return -math.inf if self._arrived else math.inf

    def __len__(self) -> int:
        return len(self._arrived)


class BatchGate:
    """Admits up to `batch_size` requests to an idle engine, as one batch.

    It opens when `batch_size` requests wait, when the first has waited `max_wait_s` (infinite for
    static batching), or when no more requests follow.
    """

    def __init__(self, *, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._waiting: deque[RequestSpec] = deque()
        self._is_closed = False

    def offer(self, spec: RequestSpec) -> None:
        """See `Gate`."""
        self._waiting.append(spec)

    def close(self) -> None:
        """See `Gate`."""
        self._is_closed = True

    def let_in(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """See `Gate`."""
        if not (is_idle and now_s >= self.next_opening_s()):
            return []
        num = min(self._batch_size, len(self._waiting))
        return [self._waiting.popleft() for _ in range(num)]

    def next_opening_s(self) -> float:
        """See `Gate`."""
        if not self._waiting:
            return math.inf
        if self._is_closed or len(self._waiting) >= self._batch_size:
            return -math.inf
        return self._waiting[0].arrival_s + self._max_wait_s

    def __len__(self) -> int:
        return len(self._waiting)
