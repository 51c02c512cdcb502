"""Retention for an executor with its own prefix cache.

Owns what such an executor is asked to keep: a retention in place of a session, which it does not
support, within the budget of block_claims.py. It evicts by itself, so a claim cannot be revoked: a
request beyond the budget is sent without retention, and its blocks count as long as they were
requested.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, replace

from penstock.scheduler.block_claims import RetentionCuts, retention_budget
from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.request_options import CacheRetention


class EngineRetention:
    """The account of retained blocks: each counts once, for the tenant that requested it first.

    Turns of a session, and prompts with a common prefix, share blocks.
    """

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo) -> None:
        self.cuts = RetentionCuts()
        self._config = config
        self._block_size = info.block_size
        self._budget = retention_budget(config, info.num_blocks)
        self._retained: dict[bytes, _Retained] = {}
        # One for each block; a block that was requested again expires later than its entry.
        self._expiries: list[tuple[float, bytes]] = []
        self._num_of: defaultdict[str, int] = defaultdict(int)

    def limit(self, specs: tuple[RequestSpec, ...], now: float) -> tuple[RequestSpec, ...]:
        """The outputs of one request with the retention that the budget allows."""
        self._expire(now)
        leader = as_retention(specs[0], self._config)
        wanted = leader.retention
        if wanted is not None and wanted.priority > DEFAULT_LEVEL:
            limited = self._budget.limit(wanted)
            blocks = self._blocks_of(leader)
            is_taken = self._take(leader.tenant, blocks, now + limited.duration_s)
            self.cuts.num_shortened += is_taken and limited is not wanted
            self.cuts.num_dropped_blocks += 0 if is_taken else len(blocks)
            wanted = limited if is_taken else None
        return tuple(replace(spec, retention=wanted, session_id="") for spec in specs)

    def _blocks_of(self, spec: RequestSpec) -> list[bytes]:
        """Names of the prompt's blocks; those without a hash belong to this request alone."""
        num_blocks = -(-spec.num_prompt_tokens // self._block_size)
        names = list(spec.block_hashes[:num_blocks])
        return names + [b"%d/%d" % (spec.key, index) for index in range(len(names), num_blocks)]

    def _take(self, tenant: str, blocks: list[bytes], until_s: float) -> bool:
        """Count the blocks, if they fit the budget."""
        budget, retained = self._budget, self._retained
        added = [block for block in blocks if block not in retained]
        if (
            self._num_of[tenant] + len(added) > budget.max_num_of_tenant
            or len(retained) + len(added) > budget.max_num_blocks
        ):
            return False
        self._num_of[tenant] += len(added)
        for block in added:
            retained[block] = _Retained(tenant, until_s)
            heapq.heappush(self._expiries, (until_s, block))
        for block in blocks:
            retained[block].until_s = max(retained[block].until_s, until_s)
        return True

    def _expire(self, now: float) -> None:
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            _, block = expiries[0]
            held = self._retained[block]
            if held.until_s > now:
                heapq.heapreplace(expiries, (held.until_s, block))
                continue
            heapq.heappop(expiries)
            del self._retained[block]
            self._num_of[held.tenant] -= 1
            if not self._num_of[held.tenant]:
                del self._num_of[held.tenant]


@dataclass(slots=True)
class _Retained:
    tenant: str
    until_s: float


def as_retention(spec: RequestSpec, config: SchedulerConfig) -> RequestSpec:
    """The same request with a retention in place of its session, of equal duration and priority.

    The request keeps its own retention where that is higher.
    """
    if not spec.session_id:
        return spec
    level, retention = config.session_retention_priority, spec.retention
    if retention is None or retention.priority < level:
        retention = CacheRetention(priority=level, duration_s=config.session_ttl_s)
    return replace(spec, retention=retention, session_id="")
