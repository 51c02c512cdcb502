"""Holds the state of `penstock top`: the last response, recent figures, the order of requests.

Sends no queries and draws nothing. The `penstock` program imports this module for every command,
so it depends on no other package.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client import LiveRequest, ServerStats

MAX_HISTORY = 120
"""Number of values in the history of a figure."""
MAX_REQUESTS = 1000
"""Maximum number of requests that are queried, the oldest first."""

SORT_KEYS: "dict[str, Callable[[LiveRequest], Any]]" = {
    "age": lambda request: request.arrival_s,
    "tokens": lambda request: (
        -(request.usage.num_prompt_tokens + request.usage.num_completion_tokens)
    ),
    "blocks": lambda request: -request.num_blocks,
    "queue": lambda request: math.inf if request.queue_position is None else request.queue_position,
    "tenant": lambda request: request.tenant,
    "phase": lambda request: request.phase,
}
"""Sort keys of requests. Requests with equal keys are sorted by age."""


@dataclass(slots=True)
class TopState:
    """The data that the `top` view displays.

    `stats` and `requests` are the last response. `problem` is the reason why the last query failed;
    empty if it succeeded. `step_s` (mean step duration in seconds, the largest of all models) and
    `tokens_per_s` (generated tokens per second, of all models) have one value per successful query.
    """

    address: str
    sort_key: str = "age"
    stats: "ServerStats | None" = None
    requests: "tuple[LiveRequest, ...]" = ()
    problem: str = ""
    step_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_HISTORY))
    tokens_per_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_HISTORY))

    def update(self, stats: "ServerStats", requests: "Sequence[LiveRequest]") -> None:
        """Store the latest statistics and live requests, and extend the histories."""
        self.stats, self.requests, self.problem = stats, tuple(requests), ""
        steps_s = [model.mean_step_s for model in stats.models if model.mean_step_s is not None]
        self.step_s.append(max(steps_s, default=0.0))
        self.tokens_per_s.append(sum(model.decode_tokens_per_s for model in stats.models))

    def record_failure(self, problem: str) -> None:
        """Record a failed query. The last response stays visible."""
        self.problem = problem

    def sort_by_next(self) -> None:
        """Switch to the next sort key."""
        keys = list(SORT_KEYS)
        self.sort_key = keys[(keys.index(self.sort_key) + 1) % len(keys)]

    @property
    def num_requests(self) -> int:
        """The total number of requests, including live requests that were not queried."""
        num_known = len(self.requests)
        if self.stats is None or num_known < MAX_REQUESTS:
            return num_known
        return max(num_known, sum(front.num_live_requests for front in self.stats.fronts))

    @property
    def sorted_requests(self) -> "list[LiveRequest]":
        """The requests in the selected order."""
        key = SORT_KEYS[self.sort_key]
        return sorted(self.requests, key=lambda request: (key(request), request.arrival_s))
