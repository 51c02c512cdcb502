"""The number of replicas needed, from the queues of the current ones.

Owns the rule, which Serve's controller calls about ten times a second. Uses only the standard
library: the controller gets a copy of this module. Limits and delays are Serve's
(`autoscaling_config`).

Scaling up depends on the wait: callers notice how long a queue is in seconds, not in requests,
whatever their requests are. An empty queue does not show how much capacity is unused, so scaling
down depends on how full the batches are.
"""

import math
from collections.abc import Mapping
from typing import Any


class QueueTimePolicy:
    """`target_queue_time_s`: the acceptable wait. `target_busy_share`: how full batches should be
    after scaling down. `max_growth`: maximum factor of one decision.

    Raises ValueError naming the parameter that is out of range.
    """

    def __init__(
        self,
        target_queue_time_s: float = 0.5,
        target_busy_share: float = 0.7,
        max_growth: float = 2.0,
    ) -> None:
        if not target_queue_time_s > 0:
            raise ValueError(f"target_queue_time_s: must be above 0, not {target_queue_time_s}")
        if not 0 < target_busy_share <= 1:
            raise ValueError(f"target_busy_share: must be in (0, 1], not {target_busy_share}")
        if not max_growth > 1:
            raise ValueError(f"max_growth: must be above 1, not {max_growth}")
        self._target_queue_time_s = target_queue_time_s
        self._target_busy_share = target_busy_share
        self._max_growth = max_growth

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return replicas and state for an AutoscalingContext; called by Serve."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        wanted = self.num_wanted(
            num_replicas=context.current_num_replicas,
            num_planned=context.target_num_replicas,
            queue_time_s=metrics.get("queue_time_s", {}),
            busy_share=metrics.get("busy_share", {}),
        )
        return wanted, {}

    def num_wanted(
        self,
        *,
        num_replicas: int,
        num_planned: int,
        queue_time_s: Mapping[Any, float],
        busy_share: Mapping[Any, float],
    ) -> int:
        """Return the number of replicas needed, from the last report of each replica.

        `num_replicas` of `num_planned` run. The number does not change while one of these has not
        reported, and does not grow while some are starting, because those will reduce the load of
        the others.
        """
        if num_replicas == 0 or len(queue_time_s) < num_replicas:
            return num_planned
        mean_wait_s = sum(queue_time_s.values()) / len(queue_time_s)
        if mean_wait_s > self._target_queue_time_s:
            if num_replicas < num_planned:
                return num_planned
            growth = min(mean_wait_s / self._target_queue_time_s, self._max_growth)
            return math.ceil(num_replicas * growth)
        num_busy = sum(busy_share.values())
        # The rounding error of the division must not add a replica: (0.7 + 0.7) / 0.7 is 2.
        num_needed = math.ceil(num_busy / self._target_busy_share - 1e-9)
        return min(num_planned, max(1, num_needed))
