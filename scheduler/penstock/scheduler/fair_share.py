"""Computes the share of slots and blocks of each tenant, and which tenants are far below others.

The shares are dominant shares (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011) over the two
resources of a running request: slots and blocks. Only current use counts; past service is in
tenant_counters.py.

A tenant is *under its share* if its dominant share, including the new request and multiplied by
`yield_ratio`, is at most the dominant share of another tenant. Shares are divided by the tenants'
weights. So of two tenants at most one is under its share relative to the other, and among tenants
with about equal shares none is. The ratio keeps tenants from preempting each other in alternation:
with the default ratio of 2, a tenant under its share gets up to half of what the largest tenant
holds, and the order of the queue (fair_order.py) balances the rest. If every tenant holds less than
all others together, `yield_ratio` is doubled: among many tenants some always hold much less than
the largest, and every preemption wastes compute.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.tenant_counters import TenantCounters

_MANY_TENANTS_FACTOR = 2.0
"""Factor of `yield_ratio` if every tenant holds less than all others together."""


class FairShare:
    """Dominant shares of the tenants with running requests, at present.

    `dominant` float64 [capacity of `TenantCounters`], by tenant index: the greater of a tenant's
    shares of slots and of blocks (held or reserved; a shared block counts for each tenant that
    holds it), divided by its weight.
    """

    def __init__(
        self,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        tenants: TenantCounters,
        yield_ratio: float,
    ) -> None:
        columns = slice(0, running.high_water)
        index, count = arrays.tenant[columns], len(tenants.service)
        held = arrays.num_blocks[columns] + cache.reserved[columns]
        self._num_slots = np.bincount(index, weights=arrays.key[columns] != 0, minlength=count)
        self._num_blocks = np.bincount(index, weights=held, minlength=count)
        self._all_slots, self._all_blocks = arrays.num_slots, cache.pool.num_blocks
        self._weight = tenants.weight
        slots, blocks = self._num_slots / self._all_slots, self._num_blocks / self._all_blocks
        self.dominant: NDArray[np.float64] = np.maximum(slots, blocks) / self._weight
        self._greatest = float(self.dominant.max(initial=0.0))
        others = float(self.dominant.sum()) - self._greatest
        is_flood = self._greatest >= others
        self._ratio = yield_ratio if is_flood else _MANY_TENANTS_FACTOR * yield_ratio

    def is_under_share(self, tenant: int, *, num_slots: int = 0, num_blocks: int = 0) -> bool:
        """Return whether a tenant is under its share with `num_slots` and `num_blocks` added to
        what it holds.
        """
        return self._scaled_share(tenant, num_slots, num_blocks) <= self._greatest

    def would_be_under_share(self, weight: float, *, num_slots: int, num_blocks: int) -> bool:
        """Return whether a tenant of this weight without running requests would be under its share
        with these slots and blocks.
        """
        slots, blocks = num_slots / self._all_slots, num_blocks / self._all_blocks
        return self._ratio * max(slots, blocks) / weight <= self._greatest

    def are_under_share(self, tenants: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which of `tenants` int32 [m], tenant indices, are under their share, bool [m]."""
        is_under: NDArray[np.bool_] = self._ratio * self.dominant[tenants] <= self._greatest
        return is_under

    def must_yield(self, tenant: int, to: int, *, num_slots: int, num_blocks: int) -> bool:
        """Return whether `tenant` holds so much that tenant `to`, with these slots and blocks added
        to what `to` holds, is under its share relative to `tenant`.

        False if both are the same, or if `tenant` has fewer than two running requests.
        """
        if tenant == to or self._num_slots[tenant] < 2:
            return False
        return self._scaled_share(to, num_slots, num_blocks) <= float(self.dominant[tenant])

    def release(self, request: Request, num_blocks: int) -> None:
        """Subtract a running request that is about to release its slot and `num_blocks` blocks."""
        tenant = request.tenant
        self._num_slots[tenant] -= 1
        self._num_blocks[tenant] -= num_blocks
        self._update(tenant)

    def add(self, tenant: int, num_blocks: int) -> None:
        """Add a request of a tenant that got a slot and `num_blocks` blocks."""
        self._num_slots[tenant] += 1
        self._num_blocks[tenant] += num_blocks
        self._update(tenant)

    def _update(self, tenant: int) -> None:
        slots = float(self._num_slots[tenant]) / self._all_slots
        blocks = float(self._num_blocks[tenant]) / self._all_blocks
        self.dominant[tenant] = max(slots, blocks) / float(self._weight[tenant])
        self._greatest = float(self.dominant.max())

    def _scaled_share(self, tenant: int, num_slots: int, num_blocks: int) -> float:
        slots = (float(self._num_slots[tenant]) + num_slots) / self._all_slots
        blocks = (float(self._num_blocks[tenant]) + num_blocks) / self._all_blocks
        return self._ratio * max(slots, blocks) / float(self._weight[tenant])
