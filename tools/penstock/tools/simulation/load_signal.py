"""Computes the load of each replica as a load balancer sees it, after a delay.

The load is computed from the requests that were sent to a replica and have not ended. The
simulation does not query the replicas, because all requests pass through the balancer.
"""

import enum
import heapq

from penstock.server.observe.recording.trace import TraceRequest


class LoadSignal(enum.StrEnum):
    """How a replica's load is computed from its open requests.

    REQUESTS: the number of open requests. TOKENS: the sum of their prompt tokens (output lengths
    are not known in advance).
    """

    REQUESTS = "requests"
    TOKENS = "tokens"


class LoadAccount:
    """The load of each replica as of `delay_s` seconds ago.

    Requests sent since then are not counted yet, and requests that ended since then are still
    counted, as in a balancer that polls the replicas (on the effect of old information:
    Mitzenmacher, "How Useful Is Old Information?", IEEE TPDS 2000).
    """

    def __init__(self, num_replicas: int, signal: LoadSignal, delay_s: float) -> None:
        self._signal = signal
        self._delay_s = delay_s
        self._loads = [0] * num_replicas
        self._to_come: list[tuple[float, int, int, int]] = []
        self._num_noted = 0

    def sent(self, replica: int, request: TraceRequest) -> int:
        """Record a request sent to a replica; return its weight, to be passed to `ended`."""
        is_counted = self._signal is LoadSignal.REQUESTS
        weight = 1 if is_counted else request.num_prompt_tokens
        self._note(request.arrival_s, replica, weight)
        return weight

    def ended(self, replica: int, weight: int, at_s: float) -> None:
        """Record that a request has ended, with any outcome; `weight`: what `sent` returned for
        it.
        """
        self._note(at_s, replica, -weight)

    def loads(self, now_s: float) -> tuple[int, ...]:
        """Return the load of each replica; `now_s` must not decrease."""
        while self._to_come and self._to_come[0][0] <= now_s:
            _, _, replica, change = heapq.heappop(self._to_come)
            self._loads[replica] += change
        return tuple(self._loads)

    def _note(self, at_s: float, replica: int, change: int) -> None:
        self._num_noted += 1
        heapq.heappush(self._to_come, (at_s + self._delay_s, self._num_noted, replica, change))
