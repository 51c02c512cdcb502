"""Detects an engine that died silently, a request that the engine lost, and an engine that fails
every request.

Measures the time since the engine's last response, overall and per request. Responses that this
executor created itself (for an abort without response, or a request rejected before submission) do
not count; otherwise a dead engine would not be detected if clients cancel early.
"""

from collections.abc import Iterable

from penstock.executor.trtllm.response_queue import Response
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.scheduler.executor import ExecutorDied

_SEARCH_INTERVAL_S = 1.0


class Watchdog:
    """Watches one engine; times are seconds on the caller's clock.

    `timeout_s`: after this time without any response, the engine is considered dead; after this
    time without a response to one request, that request is considered lost. `max_failures_in_row`:
    the engine is considered dead after this many failed requests without a token of any request in
    between; failures caused by the request itself do not count.
    """

    def __init__(self, *, timeout_s: float, max_failures_in_row: int, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._max_failures_in_row = max_failures_in_row
        self._silent_since_s: dict[SubmittedRequest, float] = {}
        self._silence_s = 0.0
        self._checked_s = now_s
        self._next_search_s = now_s
        self._num_failures_in_row = 0

    def expect(self, requests: Iterable[SubmittedRequest], now_s: float) -> None:
        """Start to expect responses to these requests. Called when they are submitted."""
        self._count_silence(now_s)
        self._silent_since_s.update((submitted, now_s) for submitted in requests)

    def remove(self, submitted: SubmittedRequest, now_s: float) -> None:
        """Expect no more responses for this request."""
        self._count_silence(now_s)
        self._silent_since_s.pop(submitted, None)

    def on_responses(self, responses: Iterable[Response], now_s: float) -> None:
        """Record responses: restart the timers of their requests and the overall one, and count
        failures in a row.
        """
        for response in responses:
            if response.is_last:
                self._silent_since_s.pop(response.submitted, None)
            if response.is_synthetic:
                if response.is_constraint_error and not self._silent_since_s:
                    # Rejected before submission, so no response of the engine is due.
                    self._silence_s = 0.0
                continue
            self._silence_s = 0.0
            self._checked_s = now_s
            if response.submitted in self._silent_since_s:
                self._silent_since_s[response.submitted] = now_s
            if response.tokens:
                self._num_failures_in_row = 0
            elif response.failure and not response.is_rejected:
                self._num_failures_in_row += 1

    def check(self, now_s: float) -> list[SubmittedRequest]:
        """Return the requests without a response for `timeout_s`, each once; searches for them at
        most once a second.

        Raises ExecutorDied if responses are due and the engine returns none for `timeout_s`, or if
        `max_failures_in_row` requests have failed in a row.
        """
        self._count_silence(now_s)
        if self._silence_s > self._timeout_s:
            raise ExecutorDied(
                f"the engine returned nothing for {self._silence_s:.0f} s, with about"
                f" {len(self._silent_since_s)} requests inside"
            )
        if self._num_failures_in_row >= self._max_failures_in_row:
            raise ExecutorDied(f"the engine failed {self._num_failures_in_row} requests in a row")
        if now_s < self._next_search_s:
            return []
        self._next_search_s = now_s + _SEARCH_INTERVAL_S
        limit_s = now_s - self._timeout_s
        lost = [each for each, since_s in self._silent_since_s.items() if since_s < limit_s]
        for submitted in lost:
            del self._silent_since_s[submitted]
        return lost

    def _count_silence(self, now_s: float) -> None:
        if self._silent_since_s:
            self._silence_s += now_s - self._checked_s
        self._checked_s = now_s
