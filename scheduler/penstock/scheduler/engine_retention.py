"""Retention for an executor that keeps its own prefix cache.

Owns what such an executor is asked to keep: a retention in place of a session, which it does not
know, within the budget of block_claims.py. It evicts by itself, so a claim cannot be taken back:
a request beyond the budget is sent without retention, and its blocks count as long as they were
asked for.
"""

import heapq
from collections import defaultdict
from dataclasses import replace

from penstock.scheduler.block_claims import retention_budget
from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.request_options import CacheRetention


class EngineRetention:
    """The account of retained prompts, in blocks of the executor's size."""

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo) -> None:
        self._config = config
        self._block_size = info.block_size
        self._budget = retention_budget(config, info.num_blocks)
        # Expiry, tenant, blocks.
        self._retained: list[tuple[float, str, int]] = []
        self._num_of: defaultdict[str, int] = defaultdict(int)
        self._num_blocks = 0

    def limit(self, specs: tuple[RequestSpec, ...], now: float) -> tuple[RequestSpec, ...]:
        """The outputs of one request with the retention that the budget allows."""
        self._expire(now)
        leader = as_retention(specs[0], self._config)
        wanted = leader.retention
        if wanted is not None and wanted.priority > DEFAULT_LEVEL:
            wanted = self._budget.limit(wanted)
            num_blocks = -(-leader.num_prompt_tokens // self._block_size)
            if not self._take(leader.tenant, num_blocks, now + wanted.duration_s):
                wanted = None
        return tuple(replace(spec, retention=wanted, session_id="") for spec in specs)

    def _take(self, tenant: str, num_blocks: int, until_s: float) -> bool:
        """Count the blocks, if they fit the budget."""
        budget = self._budget
        if (
            self._num_of[tenant] + num_blocks > budget.max_num_of_tenant
            or self._num_blocks + num_blocks > budget.max_num_blocks
        ):
            return False
        heapq.heappush(self._retained, (until_s, tenant, num_blocks))
        self._num_of[tenant] += num_blocks
        self._num_blocks += num_blocks
        return True

    def _expire(self, now: float) -> None:
        retained = self._retained
        while retained and retained[0][0] <= now:
            _, tenant, num_blocks = heapq.heappop(retained)
            self._num_of[tenant] -= num_blocks
            self._num_blocks -= num_blocks
            if not self._num_of[tenant]:
                del self._num_of[tenant]


def as_retention(spec: RequestSpec, config: SchedulerConfig) -> RequestSpec:
    """The same request with a retention in place of its session, as long and as high.

    The request keeps its own retention where that is higher.
    """
    if not spec.session_id:
        return spec
    level, retention = config.session_retention_priority, spec.retention
    if retention is None or retention.priority < level:
        retention = CacheRetention(priority=level, duration_s=config.session_ttl_s)
    return replace(spec, retention=retention, session_id="")
