"""Computes the load that a request competes with: running requests, and waiting requests ahead of
it.

The load is two sets of sums, over the running requests and over the waiting requests ahead. Both
are the input of forecast.py.

There is a special case for a tenant that would be under its fair share (fair_share.py) even if this
request and the tenant's waiting requests ahead of it were running. Other tenants of the same
priority class do not go before it: only requests of higher classes and earlier requests of the same
tenant count as waiting ahead, and only running prefills of tenants under their share delay it. If
running requests can be preempted for it (victims.py), it waits neither for a slot nor for blocks.
Without this special case the request would be rejected because of a queue that it overtakes.
"""

import math
from dataclasses import replace

from penstock.scheduler.admission_blocks import AdmissionBlocks
from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.forecast import Demand, QueuedAhead, RunningLoad, deadlines_of
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.output_lengths import OutputLengths
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.waiting_queue import WaitingQueue


class Contention:
    """Computes sums over the running requests and over the waiting requests ahead of a request."""

    def __init__(  # noqa: PLR0913 - each is one thing that a request competes for
        self,
        config: SchedulerConfig,
        sizing: StepSizing,
        lengths: OutputLengths,
        *,
        arrays: SlotArrays,
        cache: KVCache,
        blocks: AdmissionBlocks,
        running: RunningSet,
        queue: WaitingQueue,
        tenants: TenantCounters,
    ) -> None:
        self._sizing = sizing
        self._lengths = lengths
        self._arrays = arrays
        self._cache = cache
        self._blocks = blocks
        self._running = running
        self._queue = queue
        self._tenants = tenants
        self._max_tokens = config.max_num_batched_tokens
        self._yield_ratio = config.yield_ratio
        is_fair = config.order is SchedulingOrder.FAIR
        self._favours_under_share = is_fair and math.isfinite(config.yield_ratio)

    def load(self, *, has_slot: bool = False) -> RunningLoad:
        """Return the load of all running requests. `has_slot`: count at least one free slot even
        if the batch limit is reached, for a request that is about to get one.
        """
        arrays, cache, running = self._arrays, self._cache, self._running
        num_running = len(running)
        columns = slice(0, running.high_water)
        prefilling = running.prefilling()
        num_left = int(arrays.max_total[columns].sum()) - int(arrays.num_tokens[columns].sum())
        num_free_slots = max(self._sizing.max_num_running - num_running, int(has_slot), 0)
        return RunningLoad(
            num_running=num_running,
            num_decodes=num_running - len(prefilling),
            num_context_tokens=int(arrays.num_computed[columns].sum()),
            num_prefill_tokens=sum(self._num_left_each(prefilling)),
            num_output_tokens=self._lengths.expected_remaining(num_running, num_left),
            num_free_slots=num_free_slots,
            num_free_blocks=max(self._blocks.num_left, 0),
            num_used_blocks=cache.pool.num_used,
            prefill_budget_tokens=max(
                min(self._sizing.prefill_budget_tokens, self._max_tokens - num_running), 1
            ),
        )

    def load_at_arrival(self, request: Request, demand: Demand) -> tuple[RunningLoad, QueuedAhead]:
        """Return the part of the running load that delays a request that is about to join the
        queue, and sums over the waiting requests ahead of it.
        """
        queue = self._queue
        ahead = queue.ahead_of(request, demand.num_prefill_tokens, is_under_share=True)
        shares = self._shares_if_under_share(request, ahead)
        load = self._delaying_load(self.load(), request, demand, ahead, shares)
        if shares is None:
            ahead = queue.ahead_of(request, demand.num_prefill_tokens)
        return load, ahead

    def load_at_admission(self, request: Request, demand: Demand) -> RunningLoad:
        """Return the part of the running load that delays a request if it gets a slot now."""
        shares = self._shares_if_under_share(request, QueuedAhead())
        return self._delaying_load(self.load(has_slot=True), request, demand, QueuedAhead(), shares)

    def _delaying_load(
        self,
        load: RunningLoad,
        request: Request,
        demand: Demand,
        ahead: QueuedAhead,
        shares: FairShare | None,
    ) -> RunningLoad:
        """Return the part of `load` that delays a request.

        `shares`: the tenants' shares if the request's tenant is under its share, else None. A
        prompt in progress shares the budget with the request while both are in prefill, so it
        counts with at most as many tokens as the request has to compute. A prompt whose first token
        is due at the same time or earlier may get all of the budget (`DeadlinePredictor.urgent`),
        so it is counted in full. If the tenant is under its share, the returned load is the load
        after preemptions (`_after_preemption`).
        """
        in_prefill = self._running.prefilling()
        if shares is not None:
            in_prefill = [other for other in in_prefill if shares.is_under_share(other.tenant)]
            load = self._after_preemption(load, demand, ahead)
        due_s, num_own = deadlines_of(request).ttft_s, demand.num_prefill_tokens
        num_before = sum(
            num if deadlines_of(other).ttft_s <= due_s != NO_TIME else min(num, num_own)
            for other, num in zip(in_prefill, self._num_left_each(in_prefill), strict=True)
        )
        if num_before == load.num_prefill_tokens:
            return load
        return replace(load, num_prefill_tokens=num_before)

    def _shares_if_under_share(self, request: Request, ahead: QueuedAhead) -> FairShare | None:
        """Return the tenants' shares if the request's tenant is under its share, else None."""
        tenants, name = self._tenants, request.spec.tenant
        if not (self._favours_under_share and tenants.has_others(name)):
            return None
        shares = FairShare(self._arrays, self._cache, self._running, tenants, self._yield_ratio)
        num_slots = ahead.num_requests + 1
        num_blocks = ahead.num_blocks + self._blocks.num_held(request)
        index = tenants.index_of(name)
        if index is None:
            weight = tenants.weight_of(name)
            is_under_share = shares.would_be_under_share(
                weight, num_slots=num_slots, num_blocks=num_blocks
            )
        else:
            is_under_share = shares.is_under_share(
                index, num_slots=num_slots, num_blocks=num_blocks
            )
        return shares if is_under_share else None

    def _after_preemption(
        self, load: RunningLoad, demand: Demand, ahead: QueuedAhead
    ) -> RunningLoad:
        """Return the load after the preemptions that would admit the request and the requests ahead
        of it.
        """
        if not self._blocks.may_preempt:
            return load
        return replace(
            load,
            num_free_slots=max(load.num_free_slots, ahead.num_requests + 1),
            num_free_blocks=max(load.num_free_blocks, ahead.num_blocks + demand.num_blocks),
        )

    def _num_left_each(self, prefilling: list[Request]) -> list[int]:
        """Return for each request the number of tokens to compute before it decodes."""
        if not prefilling:
            return []
        slots = [request.slot for request in prefilling]
        num_left = self._arrays.num_tokens[slots] - self._arrays.num_computed[slots]
        return [int(num) for num in num_left]
