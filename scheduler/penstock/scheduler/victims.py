"""Selects victims: the running requests that are preempted.

Uses array operations over all running requests. Does not preempt, and does not decide which tenants
are under their share (fair_share.py).

**When blocks run out** (`choose_victim`): the lowest class first, where the class is the priority
raised by age at admission, so that a request admitted for its age is not preempted for its
priority. Requests of tenants under their share are preempted only if that class has no others. Then
the tenant that received the most service; then the request that loses the fewest computed tokens in
unshared blocks; among equal requests the last to arrive. Preemptions do not cycle: the request that
ranks best keeps its rank while it runs, so it completes.

**Tenant preemption** (`choose_for_tenant`): running requests are preempted so that a request of a
tenant under its share fits. They are chosen one by one from the tenant that holds the most, as long
as the waiting tenant is under its share relative to it: among the requests that free enough blocks,
the request that loses the fewest computed tokens; if none frees enough, the request that frees the
most blocks. No request is preempted unless the waiting request then fits.

**Bounds.** A tenant keeps at least one running request. A request is preempted for other tenants at
most `MAX_TENANT_PREEMPTIONS` times. At most `MAX_PREEMPTED` requests are preempted for one waiting
request, each of its class or a lower class. Preemptions do not cycle: the tenant of a preempted
request held at least `yield_ratio` times as much as the other tenant including the new request, so
it is not under its share relative to that tenant.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.request import Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.tenant_counters import TenantCounters

MAX_TENANT_PREEMPTIONS = 2
"""Maximum number of times that one request is preempted for other tenants."""
MAX_PREEMPTED = 4
"""Maximum number of requests preempted for one request."""
_MAX_TRIES = 8
"""Maximum requests of a tenant checked for each preemption, including ineligible ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a waiting request needs before it can be admitted, and what it will then hold.

    Attributes:
        is_slot: Whether no slot is free for the request.
        num_blocks_short: Number of used blocks that must be freed for it.
        num_blocks: Number of blocks that it will hold, shared and reserved ones included.
        matched: Cached blocks that it will share; not counted in `num_blocks_short` while they are
            used.
        level: The request's priority class.
    """

    tenant: int
    level: int
    is_slot: bool
    num_blocks_short: int
    num_blocks: int
    matched: tuple[int, ...] = ()


class VictimSelection:
    """Chooses which running requests of one engine are preempted."""

    def __init__(
        self, arrays: SlotArrays, cache: KVCache, running: RunningSet, tenants: TenantCounters
    ) -> None:
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._tenants = tenants

    def choose_victim(self, spared: set[int], shares: FairShare | None = None) -> Request:
        """Return the running request to preempt next, not in the slots of `spared`; raise
        ValueError if there is none. With `shares`, requests of tenants under their share are
        preempted only if the lowest class has no others.
        """
        arrays, cache, running = self._arrays, self._cache, self._running
        slots = np.flatnonzero(arrays.key[: running.high_water])
        if spared:
            slots = slots[~np.isin(slots, np.fromiter(spared, dtype=np.intp))]
        if not len(slots):
            raise ValueError("no request is left to preempt")
        levels = arrays.level[slots]
        slots = slots[levels == levels.min()]
        if shares is not None:
            is_under_share = shares.are_under_share(arrays.tenant[slots])
            if not is_under_share.all():
                slots = slots[~is_under_share]
        service = self._tenants.service[arrays.tenant[slots]]
        slots = slots[service == service.max()]
        if len(slots) > 1:
            # Computed tokens in unshared blocks, which must be recomputed after a preemption.
            losses: NDArray[np.int64] = np.array(
                [
                    max(0, int(arrays.num_computed[slot]) - cache.num_shared_tokens(slot))
                    for slot in slots.tolist()
                ],
                dtype=np.int64,
            )
            slots = slots[losses == losses.min()]
        candidates = (running.request_at(slot) for slot in slots.tolist())
        return max(
            (request for request in candidates if request is not None),
            key=lambda request: request.sequence,
        )

    def choose_for_tenant(
        self, shares: FairShare, shortage: Shortage, spared: set[int]
    ) -> list[tuple[Request, int]]:
        """Return the running requests to preempt, each with the number of blocks that it frees.

        Empty if they cannot free enough. Requests in the slots of `spared` are excluded. Those
        returned are subtracted from `shares`.
        """
        arrays = self._arrays
        columns = slice(0, self._running.high_water)
        is_candidate = (arrays.key[columns] != 0) & (arrays.level[columns] <= shortage.level)
        is_candidate[[slot for slot in spared if slot < len(is_candidate)]] = False
        chosen: list[tuple[Request, int]] = []
        num_short, is_slot = shortage.num_blocks_short, shortage.is_slot
        while num_short > 0 or is_slot:
            found = self._next(shares, shortage, is_candidate, num_short)
            if found is None or len(chosen) == MAX_PREEMPTED:
                for request, num_freed in chosen:
                    shares.add(request.tenant, num_freed)
                return []
            request, num_freed = found
            is_candidate[request.slot] = False
            shares.release(request, num_freed)
            chosen.append(found)
            num_short -= num_freed
            is_slot = False
        return chosen

    def _next(
        self,
        shares: FairShare,
        shortage: Shortage,
        is_candidate: NDArray[np.bool_],
        num_short: int,
    ) -> tuple[Request, int] | None:
        arrays = self._arrays
        slots = np.flatnonzero(is_candidate)
        if not len(slots):
            return None
        tenants = arrays.tenant[slots]
        greatest = int(tenants[np.argmax(shares.dominant[tenants])])
        if not shares.must_yield(
            greatest, shortage.tenant, num_slots=1, num_blocks=shortage.num_blocks
        ):
            return None
        slots = slots[tenants == greatest]
        held = arrays.num_blocks[slots].astype(np.int64)
        is_enough = held >= num_short
        # Requests that may free enough, the cheapest first; then the others, the largest first.
        cost = np.where(is_enough, arrays.num_computed[slots], np.iinfo(np.int64).max - held)
        best: tuple[Request, int] | None = None
        for slot in slots[np.argsort(cost, kind="stable")[:_MAX_TRIES]].tolist():
            request = self._running.request_at(slot)
            if request is None or not _may_be_preempted(request):
                # Each candidate is tried once: later iterations do not check it again.
                is_candidate[slot] = False
                continue
            num_freed = self._cache.num_freed(slot, shortage.matched)
            if num_freed >= num_short:
                return request, num_freed
            if best is None or num_freed > best[1]:
                best = request, num_freed
        return best if best is not None and best[1] > 0 else None


def _may_be_preempted(request: Request) -> bool:
    return request.num_tenant_preemptions < MAX_TENANT_PREEMPTIONS
