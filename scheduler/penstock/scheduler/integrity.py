"""The invariants of the core, checked from outside.

Owns the list of invariants that hold between any two calls, and the progress of a check: a large
pool is checked in pieces, because a new request waits for the current piece. Tests check everything
after every step; in production the engine is checked while idle. Changes nothing.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.check_pieces import PIECE, Faults
from penstock.scheduler.deadline_predictor import DeadlinePredictor
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.launched_step import LaunchedSteps
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.state import RequestState
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.transitions import LiveRequests
from penstock.scheduler.waiting_queue import WaitingQueue

_NO_BLOCKS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class IntegrityError(AssertionError):
    """An invariant does not hold; the message lists every fault found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedParts:
    """The parts of an engine that must agree."""

    requests: LiveRequests
    arrays: SlotArrays
    cache: KVCache
    running: RunningSet
    launched: LaunchedSteps
    queue: WaitingQueue
    tenants: Tenants
    quotas: QuotaAccounts
    predictor: DeadlinePredictor


class IntegrityCheck:
    """Checks an engine repeatedly, all at once or one piece at a time.

    Blocks are checked one by one, so they may change between pieces. After an interruption the next
    check resumes with the block at which the last one stopped; all other checks start over.
    """

    def __init__(self, parts: CheckedParts) -> None:
        self._parts = parts
        self._next_place = 0
        self._rest: Faults | None = None

    def check_all(self) -> None:
        """Raise IntegrityError naming every invariant that does not hold."""
        # Start at the first block, whatever was checked before.
        found = [fault for fault in IntegrityCheck(self._parts).faults() if fault]
        if found:
            raise IntegrityError("; ".join(found))

    def restart(self) -> None:
        """Restart the check, because the engine is about to change."""
        self._rest = None

    def advance(self) -> bool:
        """Check the next piece; return True if it was the last one.

        Raises IntegrityError as `check_all` does.
        """
        if self._rest is None:
            self._rest = self.faults()
        fault = next(self._rest, None)
        if fault is None:
            self._rest = None
        elif fault:
            self.check_all()
            raise IntegrityError(fault)
        return fault is None

    def faults(self) -> Faults:
        """Yield all inconsistencies, piece by piece."""
        parts, pool = self._parts, self._parts.cache.pool
        yield from (*_block_faults(parts), "")
        yield from (*_state_faults(parts), "")
        yield from (*_progress_faults(parts), "")
        yield from (*_tenant_faults(parts), "")
        # Alternate the two: a short idle period must advance the blocks too.
        totals = pool.total_faults()
        for _ in range(0, pool.num_blocks, PIECE):
            start = self._next_place
            stop = min(start + PIECE, pool.num_blocks)
            self._next_place = stop % pool.num_blocks
            yield from pool.faults_at(range(start, stop))
            yield next(totals, "")
        yield from totals


def _block_faults(parts: CheckedParts) -> list[str]:
    arrays, pool = parts.arrays, parts.cache.pool
    tables: list[NDArray[np.int32]] = []
    faults: list[str] = []
    for request in parts.running:
        slot = request.slot
        table = arrays.block_table[slot, : arrays.num_blocks[slot]]
        if len(set(table.tolist())) != len(table):
            faults.append(f"slot {slot} holds a block twice")
        tables.append(table)
        # The block of the next token must have one owner.
        writable = int(arrays.num_computed[slot]) // arrays.block_size
        if writable < len(table) and pool.ref_counts[table[writable]] != 1:
            faults.append(f"slot {slot} shares a block it writes to")
        if int(parts.cache.capacity[slot]) != len(table) * arrays.block_size:
            faults.append(f"slot {slot} misjudges its capacity")
        is_over = int(arrays.num_computed[slot]) > int(parts.cache.capacity[slot])
        if is_over and not parts.running.is_behind:
            faults.append(f"slot {slot} computed more than its blocks hold")
    # Allocate nothing as large as the pool: the allocation takes longer than all of the rest.
    held, counts = np.unique(np.concatenate([_NO_BLOCKS, *tables]), return_counts=True)
    is_counted = np.array_equal(pool.ref_counts[held], counts)
    if not is_counted or np.count_nonzero(pool.ref_counts) != len(held):
        faults.append("reference counts differ from the block tables")
    if int(parts.cache.reserved.sum()) != parts.cache.num_reserved or parts.cache.num_reserved < 0:
        faults.append("reservations do not add up")
    if not len(parts.running) and pool.num_used:
        faults.append("no request runs but blocks are used")
    return faults


def _state_faults(parts: CheckedParts) -> list[str]:
    faults: list[str] = []
    running = {request.spec.key for request in parts.running}
    waiting = {request.spec.key for request in parts.queue}
    if running & waiting or running | waiting != set(parts.requests):
        faults.append("running and waiting are not a partition of the live requests")
    for key, request in parts.requests.items():
        state = RequestState.PROCESSING if key in running else RequestState.PENDING
        if request.state is not state:
            faults.append(f"request {key} is {request.state.name}, its place is of {state.name}")
        if (request.slot >= 0) is not (key in running):
            faults.append(f"request {key} disagrees about its slot")
        if (request.queue_mark is None) is not (key in running):
            faults.append(f"request {key} disagrees about its account of waiting")
        if key in running and parts.arrays.key[request.slot] != key:
            faults.append(f"slot {request.slot} names another request")
    if np.count_nonzero(parts.arrays.key) != len(running):
        faults.append("a free slot names a request")
    return faults


def _progress_faults(parts: CheckedParts) -> list[str]:
    faults: list[str] = []
    arrays, num_launched = parts.arrays, len(parts.launched)
    for request in parts.running:
        slot = request.slot
        known, in_flight = int(arrays.num_tokens[slot]), int(arrays.num_in_flight[slot])
        computed = int(arrays.num_computed[slot])
        if not 0 <= in_flight <= num_launched:
            faults.append(f"slot {slot} has {in_flight} tokens in flight")
        if computed > known + in_flight:
            faults.append(f"slot {slot} computed tokens that do not exist")
        if known + in_flight > int(arrays.max_total[slot]):
            faults.append(f"slot {slot} exceeds its length")
    if not parts.requests and not num_launched and arrays.num_in_flight.any():
        faults.append("idle, but tokens are in flight")
    return faults


def _tenant_faults(parts: CheckedParts) -> list[str]:
    faults, tenants = parts.tenants.faults(), parts.tenants
    waiting = Counter(request.tenant for request in parts.queue)
    running = Counter(request.tenant for request in parts.running)
    for index, (num_waiting, num_running) in enumerate(
        zip(tenants.num_waiting, tenants.num_running, strict=True)
    ):
        if num_waiting != waiting[index] or num_running != running[index]:
            faults.append(f"tenant {index} is miscounted")
    for request in parts.running:
        if int(parts.arrays.tenant[request.slot]) != request.tenant:
            faults.append(f"slot {request.slot} names another tenant")
        if request.ticket >= 0:
            faults.append(f"slot {request.slot} still stands in the queue")
    live = Counter(request.spec.tenant for request in parts.requests.values())
    faults.extend(parts.quotas.faults(live))
    faults.extend(parts.queue.faults())
    faults.extend(parts.predictor.faults(parts.requests))
    return faults
