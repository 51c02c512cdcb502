"""Retention: the eviction priority that requests set for the blocks they leave in the prefix cache.

Manages these settings ("claims"), their budget and their expiry, for the scheduler's block pool
(`BlockClaims`) and for an executor with its own prefix cache (`EngineRetention`).

If several requests leave the same block in the cache, the claim with the highest level applies
until it expires; among equal levels the claim that expires last. A claim below the default applies
only while no other request has left the block in the cache, so that one request cannot lower the
priority of a shared prefix.

Claims above the default have a budget, in total and per tenant: such blocks are evicted after all
other cached blocks, so without a budget a tenant could take the whole cache. When a tenant exceeds
its budget, it loses its oldest claims; when the total budget is exceeded, the tenant with the most
claims loses its oldest. The blocks stay cached at the default level.

An executor with its own cache does not support sessions: it gets a retention instead. Since it
manages eviction, a claim cannot be revoked. So a request that exceeds the budget is sent without
retention, and the blocks of accepted claims count for the requested duration.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.scheduler.cached_blocks import DEFAULT_LEVEL
from penstock.scheduler.check_pieces import Faults, pieces
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import CacheRetention, RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionBudget:
    """Limits of claims above the default level: number of blocks, in total and per tenant, and
    duration of a claim, seconds.
    """

    max_num_blocks: int
    max_num_of_tenant: int
    max_duration_s: float

    def limit(self, retention: CacheRetention) -> CacheRetention:
        """Return the retention, shortened to `max_duration_s` if its level is above the default."""
        if retention.level <= DEFAULT_LEVEL or retention.duration_s <= self.max_duration_s:
            return retention
        return CacheRetention(level=retention.level, duration_s=self.max_duration_s)


def retention_budget(config: SchedulerConfig, num_blocks: int) -> RetentionBudget:
    """Return the budget that `config` sets for a pool of `num_blocks` blocks."""
    return RetentionBudget(
        max_num_blocks=int(config.max_retention_share * num_blocks),
        max_num_of_tenant=int(config.max_tenant_retention_share * num_blocks),
        max_duration_s=config.max_retention_s,
    )


@dataclass(slots=True)
class RetentionCuts:
    """Counts how often retention limits were applied so far.

    `num_shortened`: how often the duration of a retention was reduced to the maximum.
    `num_dropped_blocks`: blocks that lost or did not get a retention because the budget was
    exhausted.
    """

    num_shortened: int = 0
    num_dropped_blocks: int = 0


class BlockClaims:
    """The claims of requests on blocks of the prefix cache, at levels other than the default."""

    def __init__(self, budget: RetentionBudget) -> None:
        self.cuts = RetentionCuts()
        self._budget = budget
        self._claims: dict[int, tuple[int, float]] = {}
        self._ends: list[tuple[float, int]] = []
        self._num_low = 0
        # The blocks with claims above the default, by tenant, the oldest claim first.
        self._high_of: dict[str, dict[int, None]] = {}
        self._tenant_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, block: int) -> bool:
        return block in self._claims

    @property
    def num_low(self) -> int:
        """Number of claims below the default."""
        return self._num_low

    def level(self, block: int) -> int:
        """Return the claimed level of a block; the default level without a claim."""
        claim = self._claims.get(block)
        return DEFAULT_LEVEL if claim is None else claim[0]

    def make(
        self, blocks: Iterable[int], retention: CacheRetention, tenant: str, now: float
    ) -> list[int]:
        """Make a claim on each of `blocks`; return the blocks whose claims were dropped because the
        budget was exceeded, in the order in which they were dropped.

        The caller must pass the most valuable block last, because the oldest claims of a tenant are
        dropped first. First `tenant` loses claims until it is within its own budget; then, while
        the total budget is exceeded, the tenant with the most claims loses its oldest claim.

        A claim that does not exceed the existing one (by level, then by expiry) has no effect.
        """
        limited = self._budget.limit(retention)
        self.cuts.num_shortened += limited is not retention
        claim = (limited.level, now + limited.duration_s)
        for block in blocks:
            if claim > self._claims.get(block, (-1, 0.0)):
                self.drop(block)
                self._put(block, claim, tenant)
        return self._enforce_budget(tenant)

    def drop(self, block: int) -> None:
        """Remove the claim of a block, if it has one."""
        claim = self._claims.pop(block, None)
        if claim is None:
            return
        self._num_low -= claim[0] < DEFAULT_LEVEL
        tenant = self._tenant_of.pop(block, None)
        if tenant is not None:
            blocks = self._high_of[tenant]
            del blocks[block]
            if not blocks:
                del self._high_of[tenant]

    def _put(self, block: int, claim: tuple[int, float], tenant: str) -> None:
        self._claims[block] = claim
        level, expires_s = claim
        self._num_low += level < DEFAULT_LEVEL
        if level > DEFAULT_LEVEL:
            self._tenant_of[block] = tenant
            self._high_of.setdefault(tenant, {})[block] = None
        if len(self._ends) > 2 * len(self._claims) + 64:
            self._ends = [(until_s, there) for there, (_, until_s) in self._claims.items()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (expires_s, block))

    def _enforce_budget(self, tenant: str) -> list[int]:
        """Drop claims over the budget after `tenant` made new claims; return their blocks."""
        lost: list[int] = []
        budget, high_of = self._budget, self._high_of
        while len(high_of.get(tenant, ())) > budget.max_num_of_tenant:
            lost.append(self._drop_oldest(tenant))
        while len(self._tenant_of) > budget.max_num_blocks:
            # On a tie `tenant` counts as the larger, so that it cannot drop claims of a tenant with
            # as many.
            largest = max(high_of, key=lambda name: (len(high_of[name]), name == tenant))
            lost.append(self._drop_oldest(largest))
        self.cuts.num_dropped_blocks += len(lost)
        return lost

    def _drop_oldest(self, tenant: str) -> int:
        block = next(iter(self._high_of[tenant]))
        self.drop(block)
        return block

    def drop_low(self, blocks: Iterable[int]) -> None:
        """Drop the claims below the default on `blocks`, because another request released them with
        at least the default level.
        """
        for block in blocks:
            if self.level(block) < DEFAULT_LEVEL:
                self.drop(block)

    def expire(self, now: float) -> list[int]:
        """Drop expired claims; return their blocks."""
        ends, expired = self._ends, list[int]()
        while ends and ends[0][0] <= now:
            expires_s, block = heapq.heappop(ends)
            claim = self._claims.get(block)
            if claim is not None and claim[1] == expires_s:
                self.drop(block)
                expired.append(block)
        return expired

    def faults(self) -> Faults:
        """Check the claims in small parts; yield each part's fault, or an empty string."""
        num_low, ends = 0, set[tuple[float, int]]()
        for known in pieces(self._ends):
            ends.update(known)
            yield ""
        for piece in pieces(self._claims.items()):
            num_low += sum(level < DEFAULT_LEVEL for _, (level, _) in piece)
            if any((until_s, block) not in ends for block, (_, until_s) in piece):
                yield "a claim has no expiry"
            if any(level == DEFAULT_LEVEL for _, (level, _) in piece):
                yield "a claim has the default level"
            yield ""
        if num_low != self._num_low:
            yield "low claims are miscounted"
        yield ""
        yield from self._budget_faults()

    def _budget_faults(self) -> Faults:
        by_tenant = {block: name for name, high in self._high_of.items() for block in high}
        if by_tenant != self._tenant_of or not all(self._high_of.values()):
            yield "claims and their tenants are inconsistent"
        if by_tenant.keys() != {
            b for b, (level, _) in self._claims.items() if level > DEFAULT_LEVEL
        }:
            yield "a claim and its tenant's list of claims are inconsistent"
        sizes = [len(high) for high in self._high_of.values()]
        budget = self._budget
        if max(sizes, default=0) > budget.max_num_of_tenant or sum(sizes) > budget.max_num_blocks:
            yield "claims exceed their budget"


class EngineRetention:
    """Keeps the retention of an executor with its own cache within the budget, by counting retained
    blocks.

    Turns of a session, and prompts with a common prefix, share blocks. A shared block counts once,
    for the tenant that claimed it first.
    """

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo) -> None:
        self.cuts = RetentionCuts()
        self._config = config
        self._block_size = info.block_size
        self._budget = retention_budget(config, info.num_blocks)
        self._retained: dict[bytes, _Retained] = {}
        # One entry per block. If a block was claimed again, its actual expiry is later than its
        # entry.
        self._expiries: list[tuple[float, bytes]] = []
        self._num_of: defaultdict[str, int] = defaultdict(int)

    def limit(self, specs: tuple[RequestSpec, ...], now: float) -> tuple[RequestSpec, ...]:
        """Return the specs of one request's outputs with the retention that the budget allows, if
        any. All get the retention of the first, and none has a session: a session is replaced by a
        retention (see `as_retention`).
        """
        self._expire(now)
        leader = as_retention(specs[0], self._config)
        wanted = leader.retention
        if wanted is not None and wanted.level > DEFAULT_LEVEL:
            limited = self._budget.limit(wanted)
            blocks = self._blocks_of(leader)
            is_reserved = self._reserve(leader.tenant, blocks, now + limited.duration_s)
            self.cuts.num_shortened += is_reserved and limited is not wanted
            self.cuts.num_dropped_blocks += 0 if is_reserved else len(blocks)
            wanted = limited if is_reserved else None
        return tuple(replace(spec, retention=wanted, session_id="") for spec in specs)

    def _blocks_of(self, spec: RequestSpec) -> list[bytes]:
        """Return identifiers of the prompt's blocks; a block without a hash gets a unique one."""
        num_blocks = -(-spec.num_prompt_tokens // self._block_size)
        names = list(spec.block_hashes[:num_blocks])
        return names + [b"%d/%d" % (spec.key, index) for index in range(len(names), num_blocks)]

    def _reserve(self, tenant: str, blocks: list[bytes], until_s: float) -> bool:
        """If the blocks that are not counted yet fit into the budget, count all `blocks` as
        retained until at least `until_s`; return whether they fit.
        """
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
    """Return the spec with its session, if any, replaced by a retention of the same duration and
    level.

    The request's own retention is kept if its level is at least as high.
    """
    if not spec.session_id:
        return spec
    level, retention = config.session_retention_level, spec.retention
    if retention is None or retention.level < level:
        retention = CacheRetention(level=level, duration_s=config.session_ttl_s)
    return replace(spec, retention=retention, session_id="")
