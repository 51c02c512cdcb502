"""Admission to the engine: the only difference between in-flight, static and dynamic batching.

Owns the requests that a batching server holds back before it hands them over. Static batching waits
for a whole batch and runs it to its end before the next; dynamic batching does the same but waits
only so long for the batch to fill. The engine behind them is the production one and releases
finished requests early, which is generous to both: nothing is padded.
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
        """No more requests follow."""
        ...

    def let_in(self, now_s: float, *, is_idle: bool) -> list[RequestSpec]:
        """Requests that enter now; `is_idle`: the engine has nothing to do."""
        ...

    def next_opening_s(self) -> float:
        """When `let_in` would admit a request to an idle engine; infinite when it is not known."""
        ...

    def __len__(self) -> int:
        """Requests held back."""
        ...


class OpenGate:
    """All requests enter at once: in-flight batching, the queue is the scheduler's."""

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
    """Lets up to `batch_size` requests into an idle engine, as one batch.

    It opens when that many wait, when the first has waited `max_wait_s` (infinite for static
    batching), and when no more will come.
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
