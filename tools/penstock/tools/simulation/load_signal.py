"""The load of each replica as a balancer sees it, with its delay.

Counts the requests that were sent and have not ended, delayed by the age of the signal. Does not
choose a replica and reads none: all of these events pass the balancer.
"""

import enum
import heapq

from penstock.server.observe.recording.trace import TraceRequest


class LoadSignal(enum.StrEnum):
    """The measure of a replica's open requests.

    REQUESTS: their number. TOKENS: the tokens of their prompts, which distinguishes a long prompt
    from a short one; the length of the output is unknown.
    """

    REQUESTS = "requests"
    TOKENS = "tokens"


class LoadAccount:
    """Load per replica as of `delay_s` seconds ago; exact with a delay of 0.

    With a delay the balancer sees neither requests sent nor requests ended since then, like a
    balancer that reads the replicas' reports (on the effect of old information: Mitzenmacher, "How
    Useful Is Old Information?", IEEE TPDS 2000).
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
        """Record that a request has ended, with any outcome."""
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
