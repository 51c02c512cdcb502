"""Checks the invariants of the scheduler core.

Contains the invariants that hold between any two calls of the engine, and `IntegrityCheck`, which
continues a check over several calls: a large pool is checked in small parts (check_pieces.py), so
that a new request waits only for the current part. Tests check everything after every step; in
production the engine is checked while idle. Read-only.
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
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.transitions import LiveRequests
from penstock.scheduler.waiting_queue import WaitingQueue

_NO_BLOCKS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class IntegrityError(AssertionError):
    """An invariant is violated; the message lists every fault found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedParts:
    """The components of an engine whose consistency is checked."""

    requests: LiveRequests
    arrays: SlotArrays
    cache: KVCache
    running: RunningSet
    launched: LaunchedSteps
    queue: WaitingQueue
    tenants: TenantCounters
    quotas: QuotaAccounts
    predictor: DeadlinePredictor


class IntegrityCheck:
    """Checks an engine repeatedly, completely or in small parts.

    Blocks are checked independently, so other blocks may have changed since they were checked.
    After an interruption the next check resumes with the block at which the last one stopped; all
    other checks start over.
    """

    def __init__(self, parts: CheckedParts) -> None:
        self._parts = parts
        self._next_place = 0
        self._rest: Faults | None = None

    def check_all(self) -> None:
        """Raise IntegrityError naming every violated invariant."""
        # Start at the first block, not where the last check stopped.
        found = [fault for fault in IntegrityCheck(self._parts).faults() if fault]
        if found:
            raise IntegrityError("; ".join(found))

    def restart(self) -> None:
        """Make the next `advance` start a new check, because the engine is about to change; the
        check of blocks continues where it stopped.
        """
        self._rest = None

    def advance(self) -> bool:
        """Check the next part of the engine; return True if all parts had been checked already.

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
        """Check the engine in small parts; yield each part's fault, or an empty string."""
        parts, pool = self._parts, self._parts.cache.pool
        yield from (*_block_faults(parts), "")
        yield from (*_state_faults(parts), "")
        yield from (*_progress_faults(parts), "")
        yield from (*_tenant_faults(parts), "")
        # Alternate the two checks, so that a short idle period also advances the check of blocks.
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
            faults.append(f"slot {slot} has a block twice in its table")
        tables.append(table)
        # The block that the next token is written to must have one owner.
        writable = int(arrays.num_computed[slot]) // arrays.block_size
        if writable < len(table) and pool.ref_counts[table[writable]] != 1:
            faults.append(f"slot {slot} shares the block that it writes to")
        if int(parts.cache.capacity[slot]) != len(table) * arrays.block_size:
            faults.append(f"slot {slot} has a wrong capacity")
        is_over = int(arrays.num_computed[slot]) > int(parts.cache.capacity[slot])
        if is_over and not parts.running.is_behind:
            faults.append(f"slot {slot} computed more tokens than its blocks can hold")
    # Avoid a temporary array of the pool's size: its allocation takes longer than the whole check.
    held, counts = np.unique(np.concatenate([_NO_BLOCKS, *tables]), return_counts=True)
    is_counted = np.array_equal(pool.ref_counts[held], counts)
    if not is_counted or np.count_nonzero(pool.ref_counts) != len(held):
        faults.append("reference counts differ from the block tables")
    if int(parts.cache.reserved.sum()) != parts.cache.num_reserved or parts.cache.num_reserved < 0:
        faults.append("the total of reservations is not the sum over slots")
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
            faults.append(f"request {key} is {request.state.name}, but is stored as {state.name}")
        if (request.slot >= 0) is not (key in running):
            faults.append(f"request {key} has another slot than the slot's record")
        if (request.queue_mark is None) is not (key in running):
            faults.append(f"request {key} has a wait account that does not match its state")
        if key in running and parts.arrays.key[request.slot] != key:
            faults.append(f"slot {request.slot} has the key of another request")
    if np.count_nonzero(parts.arrays.key) != len(running):
        faults.append("a free slot has a request key")
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
            faults.append(f"slot {slot} computed more tokens than it has")
        if known + in_flight > int(arrays.max_total[slot]):
            faults.append(f"slot {slot} exceeds its maximum length")
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
            faults.append(f"slot {request.slot} has the index of another tenant")
        if request.ticket >= 0:
            faults.append(f"slot {request.slot} is still in the queue")
    live = Counter(request.spec.tenant for request in parts.requests.values())
    faults.extend(parts.quotas.faults(live))
    faults.extend(parts.queue.faults())
    faults.extend(parts.predictor.faults(parts.requests))
    return faults
