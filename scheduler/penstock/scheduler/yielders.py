"""Tenant preemption: running requests that make room for a tenant under its share.

Owns that choice. Does not preempt, nor decide which tenants are under their share (shares.py).

One by one from the tenant that holds most, as long as the other would be under its share relative
to it: of those that free what is lacking the one that loses fewest computed tokens, or, if none
frees it all, the one that frees most. All or none: no request is preempted unless the waiting one
then fits.

**Bounds.** A tenant keeps one running request. A request is preempted so at most `MAX_YIELDS`
times. For one request at most `MAX_YIELDERS` are preempted; each is of the same class or a lower
one. Preemptions do not cycle: a preempted request belongs to a tenant that held at least
`yield_ratio` times as much as the other with what it took, so that it is not under its share
relative to it.
"""

from dataclasses import dataclass

import numpy as np

from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.request import Request
from penstock.scheduler.shares import Shares

MAX_YIELDS = 2
"""How often one request is preempted for other tenants."""
MAX_YIELDERS = 4
"""How many are preempted for one request."""
_MAX_TRIES = 8
"""How many of a tenant's are checked for each preemption, ineligible ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """What a waiting request lacks, and what its tenant would hold more.

    `is_slot`: it needs an occupied slot. `num_blocks_short`: used blocks that it needs;
    `num_blocks`: what its admission takes in all. `matched`: cached blocks that it will share, left
    out of `num_blocks_short` while they are used. `level`: its class.
    """

    tenant: int
    level: int
    is_slot: bool
    num_blocks_short: int
    num_blocks: int
    matched: tuple[int, ...] = ()


def choose_yielders(
    life: Lifecycle, shares: Shares, lack: Lack, spared: set[int]
) -> list[tuple[Request, int]]:
    """Running requests and the blocks that each frees, together enough; none if there are not
    enough. None of the slots of `spared`. Updates `shares`.
    """
    arrays = life.arrays
    columns = slice(0, life.running.high_water)
    is_candidate = (arrays.key[columns] != 0) & (arrays.level[columns] <= lack.level)
    is_candidate[[slot for slot in spared if slot < len(is_candidate)]] = False
    chosen: list[tuple[Request, int]] = []
    num_short, is_slot = lack.num_blocks_short, lack.is_slot
    while num_short > 0 or is_slot:
        found = _next(life, shares, lack, is_candidate, num_short)
        if found is None or len(chosen) == MAX_YIELDERS:
            for request, num_freed in chosen:
                shares.take(request.tenant, num_freed)
            return []
        request, num_freed = found
        is_candidate[request.slot] = False
        shares.give_back(request, num_freed)
        chosen.append(found)
        num_short -= num_freed
        is_slot = False
    return chosen


def _next(
    life: Lifecycle,
    shares: Shares,
    lack: Lack,
    is_candidate: np.ndarray[tuple[int], np.dtype[np.bool_]],
    num_short: int,
) -> tuple[Request, int] | None:
    arrays = life.arrays
    slots = np.flatnonzero(is_candidate)
    if not len(slots):
        return None
    tenants = arrays.tenant[slots]
    greatest = int(tenants[np.argmax(shares.dominant[tenants])])
    if not shares.must_yield(greatest, lack.tenant, num_slots=1, num_blocks=lack.num_blocks):
        return None
    slots = slots[tenants == greatest]
    held = arrays.num_blocks[slots].astype(np.int64)
    is_enough = held >= num_short
    # Those that may free enough, the cheapest first; then the others, the largest first.
    cost = np.where(is_enough, arrays.num_computed[slots], np.iinfo(np.int64).max - held)
    best: tuple[Request, int] | None = None
    for slot in slots[np.argsort(cost, kind="stable")[:_MAX_TRIES]].tolist():
        request = life.running.request_at(slot)
        if request is None or not _may_yield(request):
            # Tried once for all: later calls do not check it again.
            is_candidate[slot] = False
            continue
        num_freed = _num_freed(life, slot, lack.matched)
        if num_freed >= num_short:
            return request, num_freed
        if best is None or num_freed > best[1]:
            best = request, num_freed
    return best if best is not None and best[1] > 0 else None


def _may_yield(request: Request) -> bool:
    # A constrained output may not be resumable.
    return request.num_yields < MAX_YIELDS and request.spec.constraint is None


def _num_freed(life: Lifecycle, slot: int, matched: tuple[int, ...]) -> int:
    """Blocks that only this request uses, and that its replacement does not."""
    arrays = life.arrays
    table = arrays.block_table[slot, : arrays.num_blocks[slot]]
    is_freed = life.cache.pool.ref_counts[table] == 1
    if matched:
        is_freed &= ~np.isin(table, matched)
    return int(np.count_nonzero(is_freed)) + int(life.cache.reserved[slot])
