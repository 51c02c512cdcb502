"""Computes the required number of replicas from the queues of the current replicas.

Serve's controller calls the policy about ten times per second. Uses only the standard library,
because the controller gets a copy of this module. Serve applies its own limits and delays
(`autoscaling_config`).

Scaling up depends on the wait, because callers experience the length of a queue in seconds, not in
requests. An empty queue does not indicate how much capacity is unused, so scaling down depends on
the used share of the slots.
"""

import math
from collections.abc import Mapping
from typing import Any


class QueueTimePolicy:
    """A Ray Serve autoscaling policy. Raises ValueError naming the parameter, if one is out of
    range.

    `target_queue_time_s` is the acceptable wait in seconds. `target_busy_share` is the share of the
    slots that should be used after scaling down. `max_growth` is the maximum factor by which one
    decision increases the number of replicas.
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
        """Return the required number of replicas and an empty state for an AutoscalingContext.
        Called by Serve."""
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
        """Return the required number of replicas, from the last report of each replica. The keys of
        `queue_time_s` and `busy_share` are replicas.

        `num_replicas` of the `num_planned` replicas are running. While a running replica has not
        reported, the planned number does not change. While some replicas are starting, it does not
        grow, because the starting replicas will reduce the load of the others. It shrinks, to at
        least 1, only while the mean wait is at most the target.
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
        # A rounding error of the division must not add a replica: (0.7 + 0.7) / 0.7 is 2.
        num_needed = math.ceil(num_busy / self._target_busy_share - 1e-9)
        return min(num_planned, max(1, num_needed))
