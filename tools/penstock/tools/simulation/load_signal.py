"""The load of each replica as a balancer sees it, with its delay.

Owns the account of requests that were sent and have not ended, delayed by the age of the signal.
Does not choose, and does not look into a replica: everything here passes the balancer anyway.
"""

import enum
import heapq

from penstock.server.observe.recording.trace import TraceRequest


class LoadSignal(enum.StrEnum):
    """The measure of a replica's open requests.

    REQUESTS: how many. TOKENS: the tokens of their prompts, which distinguishes a long prompt from
    a short one; how much a request will generate is unknown.
    """

    REQUESTS = "requests"
    TOKENS = "tokens"


class LoadAccount:
    """Load per replica as of `delay_s` seconds ago; the exact one at 0.

    With a delay the balancer sees neither what it sent nor what ended since then, as one that reads
    the replicas' reports (on the effect of old information: Mitzenmacher, "How Useful Is Old
    Information?", IEEE TPDS 2000).
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
        """A request has ended, in whatever way."""
        self._note(at_s, replica, -weight)

    def loads(self, now_s: float) -> tuple[int, ...]:
        """Load of each replica; `now_s` must not go back."""
        while self._to_come and self._to_come[0][0] <= now_s:
            _, _, replica, change = heapq.heappop(self._to_come)
            self._loads[replica] += change
        return tuple(self._loads)

    def _note(self, at_s: float, replica: int, change: int) -> None:
        self._num_noted += 1
        heapq.heappush(self._to_come, (at_s + self._delay_s, self._num_noted, replica, change))
