"""The invariants of the core, checked from outside.

Owns the list of invariants that hold between any two calls, and the progress of a check: a large
pool is checked in pieces, because a new request waits for the current one. Tests check all after
every step; in production an idle engine is checked. Changes nothing.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.check_pieces import PIECE, Faults
from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.state import RequestState

_NO_BLOCKS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class IntegrityError(AssertionError):
    """An invariant does not hold; the message lists every fault found."""


def check_integrity(scheduler: Scheduler) -> None:
    """Raise IntegrityError naming every invariant that does not hold."""
    found = [fault for fault in IntegrityCheck(scheduler).faults() if fault]
    if found:
        raise IntegrityError("; ".join(found))


class IntegrityCheck:
    """Checks a scheduler repeatedly, one piece at a time.

    Blocks are checked one by one, so they may change in between: an interrupted check continues
    with the block where the one before stopped. The rest starts again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._next_place = 0
        self._rest: Faults | None = None

    def restart(self) -> None:
        """The scheduler is about to change."""
        self._rest = None

    def advance(self) -> bool:
        """Check the next piece; True when it was the last one.

        Raises IntegrityError as `check_integrity` does.
        """
        if self._rest is None:
            self._rest = self.faults()
        fault = next(self._rest, None)
        if fault is None:
            self._rest = None
        elif fault:
            check_integrity(self._scheduler)
            raise IntegrityError(fault)
        return fault is None

    def faults(self) -> Faults:
        """All faults, piece by piece."""
        life, pool = self._scheduler.life, self._scheduler.life.cache.pool
        yield from (*_block_faults(life), "")
        yield from (*_state_faults(life), "")
        yield from (*_progress_faults(life, self._scheduler.num_launched), "")
        yield from (*_tenant_faults(life), "")
        # Alternately: a short idle period must advance the blocks too.
        totals = pool.total_faults()
        for _ in range(0, pool.num_blocks, PIECE):
            start = self._next_place
            stop = min(start + PIECE, pool.num_blocks)
            self._next_place = stop % pool.num_blocks
            yield from pool.faults_at(range(start, stop))
            yield next(totals, "")
        yield from totals


def _block_faults(life: Lifecycle) -> list[str]:
    arrays, pool = life.arrays, life.cache.pool
    tables: list[NDArray[np.int32]] = []
    faults: list[str] = []
    for request in life.running:
        slot = request.slot
        table = arrays.block_table[slot, : arrays.num_blocks[slot]]
        if len(set(table.tolist())) != len(table):
            faults.append(f"slot {slot} holds a block twice")
        tables.append(table)
        # The block of the next token must have one owner.
        writable = int(arrays.num_computed[slot]) // arrays.block_size
        if writable < len(table) and pool.ref_counts[table[writable]] != 1:
            faults.append(f"slot {slot} shares a block it writes to")
        if int(life.cache.capacity[slot]) != len(table) * arrays.block_size:
            faults.append(f"slot {slot} misjudges its capacity")
        is_over = int(arrays.num_computed[slot]) > int(life.cache.capacity[slot])
        if is_over and not life.is_behind:
            faults.append(f"slot {slot} computed more than its blocks hold")
    # Nothing as large as the pool is made: to get the memory takes longer than all of the rest.
    held, counts = np.unique(np.concatenate([_NO_BLOCKS, *tables]), return_counts=True)
    is_counted = np.array_equal(pool.ref_counts[held], counts)
    if not is_counted or np.count_nonzero(pool.ref_counts) != len(held):
        faults.append("reference counts differ from the block tables")
    if int(life.cache.reserved.sum()) != life.cache.num_reserved or life.cache.num_reserved < 0:
        faults.append("reservations do not add up")
    if not len(life.running) and pool.num_used:
        faults.append("no request runs but blocks are used")
    return faults


def _state_faults(life: Lifecycle) -> list[str]:
    faults: list[str] = []
    running = {request.spec.key for request in life.running}
    waiting = {request.spec.key for request in life.queue}
    if running & waiting or running | waiting != set(life.requests):
        faults.append("running and waiting are not a partition of the live requests")
    for key, request in life.requests.items():
        state = RequestState.PROCESSING if key in running else RequestState.PENDING
        if request.state is not state:
            faults.append(f"request {key} is {request.state.name}, its place is of {state.name}")
        if (request.slot >= 0) is not (key in running):
            faults.append(f"request {key} disagrees about its slot")
        if (request.queue_mark is None) is not (key in running):
            faults.append(f"request {key} disagrees about its account of waiting")
        if key in running and life.arrays.key[request.slot] != key:
            faults.append(f"slot {request.slot} names another request")
    if sum(len(request.tokens) for request in life.queue) != life.queue.num_tokens:
        faults.append("the queue miscounts its tokens")
    if np.count_nonzero(life.arrays.key) != len(running):
        faults.append("a free slot names a request")
    return faults


def _progress_faults(life: Lifecycle, num_launched: int) -> list[str]:
    faults: list[str] = []
    arrays = life.arrays
    for request in life.running:
        slot = request.slot
        known, in_flight = int(arrays.num_tokens[slot]), int(arrays.num_in_flight[slot])
        computed = int(arrays.num_computed[slot])
        if not 0 <= in_flight <= num_launched:
            faults.append(f"slot {slot} has {in_flight} tokens in flight")
        if computed > known + in_flight:
            faults.append(f"slot {slot} computed tokens that do not exist")
        if known + in_flight > int(arrays.max_total[slot]):
            faults.append(f"slot {slot} exceeds its length")
    if not life.requests and not num_launched and arrays.num_in_flight.any():
        faults.append("idle, but tokens are in flight")
    return faults


def _tenant_faults(life: Lifecycle) -> list[str]:
    faults, tenants = life.tenants.faults(), life.tenants
    waiting = Counter(request.tenant for request in life.queue)
    running = Counter(request.tenant for request in life.running)
    for index, (num_waiting, num_running) in enumerate(
        zip(tenants.num_waiting, tenants.num_running, strict=True)
    ):
        if num_waiting != waiting[index] or num_running != running[index]:
            faults.append(f"tenant {index} is miscounted")
    for request in life.running:
        if int(life.arrays.tenant[request.slot]) != request.tenant:
            faults.append(f"slot {request.slot} names another tenant")
        if request.ticket >= 0:
            faults.append(f"slot {request.slot} still stands in the queue")
    if sum(request.ticket >= 0 for request in life.queue) != len(life.queue.order):
        faults.append("the order miscounts who stands in it")
    if len(life.queue.sums) != len(life.queue.order):
        faults.append("the sums of the queue miss a request")
    live = Counter(request.spec.tenant for request in life.requests.values())
    faults.extend(life.quotas.faults(live))
    faults.extend(life.queue.sums.faults())
    faults.extend(life.queue.places.faults(tuple(life.queue)))
    faults.extend(life.outlook.prefixes.faults(life.requests))
    return faults
