"""The share of slots and blocks that each tenant holds, and which tenants hold far less than
others.

Owns the measure: dominant shares (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011) over the
two resources of a running request, a slot and blocks. A snapshot of one moment: past service is in
tenants.py. Does not decide anything.

A tenant is *light* while the amount that it holds and requests, times `yield_ratio` is at most what
another tenant holds, both divided by the tenants' weights. So two tenants are never light relative
to each other, and of several that hold about the same none is light. The ratio keeps tenants from
preempting each other alternately: with the usual 2, being light brings a tenant to half of what the
largest holds, and the order of the queue (fair_order.py) does the rest. Where no tenant holds more
than all others together, the threshold is half of that: among many tenants there are always tenants
that hold much less than the largest one, and every preemption costs compute that is lost.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.tenants import Tenants

_CROWD = 2.0
"""Factor of the threshold where no tenant holds more than all others together."""


class FairShare:
    """Dominant shares of the tenants with running requests, at present.

    `dominant` float64 [capacity of the tenants' table]: the greater of a tenant's shares of slots
    and of blocks (held or reserved; a shared block counts with each holder), over its weight.
    """

    def __init__(
        self,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        tenants: Tenants,
        yield_ratio: float,
    ) -> None:
        columns = slice(0, running.high_water)
        index, count = arrays.tenant[columns], len(tenants.service)
        held = arrays.num_blocks[columns] + cache.reserved[columns]
        self._num_slots = np.bincount(index, weights=arrays.key[columns] != 0, minlength=count)
        self._num_blocks = np.bincount(index, weights=held, minlength=count)
        self._all_slots, self._all_blocks = arrays.num_slots, cache.num_blocks
        self._weight = tenants.weight
        slots, blocks = self._num_slots / self._all_slots, self._num_blocks / self._all_blocks
        self.dominant: NDArray[np.float64] = np.maximum(slots, blocks) / self._weight
        self._greatest = float(self.dominant.max(initial=0.0))
        others = float(self.dominant.sum()) - self._greatest
        is_flood = self._greatest >= others
        self._ratio = yield_ratio if is_flood else _CROWD * yield_ratio

    def is_light(self, tenant: int, *, num_slots: int = 0, num_blocks: int = 0) -> bool:
        """Whether a tenant is light with `num_slots` and `num_blocks` in addition to its own."""
        return self._limit(tenant, num_slots, num_blocks) <= self._greatest

    def would_be_light(self, weight: float, *, num_slots: int, num_blocks: int) -> bool:
        """Whether a tenant of this weight that has no requests yet would be light."""
        slots, blocks = num_slots / self._all_slots, num_blocks / self._all_blocks
        return self._ratio * max(slots, blocks) / weight <= self._greatest

    def are_light(self, tenants: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return `is_light` for each entry of `tenants` [m]."""
        light: NDArray[np.bool_] = self._ratio * self.dominant[tenants] <= self._greatest
        return light

    def must_yield(self, tenant: int, to: int, *, num_slots: int, num_blocks: int) -> bool:
        """Whether one tenant holds so much that another would be light relative to it.

        False if it has a single running request.
        """
        if tenant == to or self._num_slots[tenant] < 2:
            return False
        return self._limit(to, num_slots, num_blocks) <= float(self.dominant[tenant])

    def give_back(self, request: Request, num_blocks: int) -> None:
        """Record that a running request is about to release its slot and `num_blocks` blocks."""
        tenant = request.tenant
        self._num_slots[tenant] -= 1
        self._num_blocks[tenant] -= num_blocks
        self._measure(tenant)

    def take(self, tenant: int, num_blocks: int) -> None:
        """Record that a request of a tenant got a slot and `num_blocks` blocks."""
        self._num_slots[tenant] += 1
        self._num_blocks[tenant] += num_blocks
        self._measure(tenant)

    def _measure(self, tenant: int) -> None:
        slots = float(self._num_slots[tenant]) / self._all_slots
        blocks = float(self._num_blocks[tenant]) / self._all_blocks
        self.dominant[tenant] = max(slots, blocks) / float(self._weight[tenant])
        self._greatest = float(self.dominant.max())

    def _limit(self, tenant: int, num_slots: int, num_blocks: int) -> float:
        slots = (float(self._num_slots[tenant]) + num_slots) / self._all_slots
        blocks = (float(self._num_blocks[tenant]) + num_blocks) / self._all_blocks
        return self._ratio * max(slots, blocks) / float(self._weight[tenant])
