"""The load next to a request: running requests, and waiting requests ahead of it.

Owns both, as the sums that forecast.py uses. Decides nothing.

A request of a light tenant (fair_share.py) goes before the others of its class. Ahead of it are
higher classes, its own tenant's requests and the prompts of light tenants in progress; where
running requests can be preempted for it (victims.py), it lacks neither a slot nor blocks. It counts
as light if its tenant is still light including all requests ahead of it. With the forecast for
other requests it would be refused for the length of a queue that it does not wait in.
"""

import math
from dataclasses import replace

from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig, SchedulingOrder
from penstock.scheduler.fair_share import FairShare
from penstock.scheduler.forecast import Demand, Load, QueuedAhead, deadlines_of
from penstock.scheduler.kv_cache import KVCache
from penstock.scheduler.output_lengths import OutputLengths
from penstock.scheduler.request import NO_TIME, Request
from penstock.scheduler.running import RunningSet
from penstock.scheduler.slot_arrays import SlotArrays
from penstock.scheduler.step_sizing import StepSizing
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.waiting_queue import WaitingQueue


class Contention:
    """Sums over the running and waiting requests of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        sizing: StepSizing,
        lengths: OutputLengths,
        *,
        arrays: SlotArrays,
        cache: KVCache,
        running: RunningSet,
        queue: WaitingQueue,
        tenants: Tenants,
    ) -> None:
        self._sizing = sizing
        self._lengths = lengths
        self._arrays = arrays
        self._cache = cache
        self._running = running
        self._queue = queue
        self._tenants = tenants
        self._max_tokens = config.max_num_batched_tokens
        self._yield_ratio = config.yield_ratio
        is_fair = config.order is SchedulingOrder.FAIR
        self._serves_light = is_fair and math.isfinite(config.yield_ratio)
        self._preempts_for_tenants = config.admission_policy is AdmissionPolicy.MAX_UTILIZATION

    def load(self, *, has_place: bool = False) -> Load:
        """Return the load of all running requests. `has_place`: one more fits, apart from the limit
        on the batch.
        """
        arrays, cache, running = self._arrays, self._cache, self._running
        num_running = len(running)
        columns = slice(0, running.high_water)
        prefilling = running.prefilling()
        num_left = int(arrays.max_total[columns].sum()) - int(arrays.num_tokens[columns].sum())
        num_places = max(self._sizing.max_num_running - num_running, int(has_place), 0)
        return Load(
            num_running=num_running,
            num_decodes=num_running - len(prefilling),
            num_context_tokens=int(arrays.num_computed[columns].sum()),
            num_prefill_tokens=sum(self._nums_left(prefilling)),
            num_output_tokens=self._lengths.expected_remaining(num_running, num_left),
            num_free_slots=num_places,
            num_free_blocks=max(cache.num_available - cache.num_reserved, 0),
            num_used_blocks=cache.num_used,
            prefill_budget_tokens=max(
                min(self._sizing.prefill_budget_tokens, self._max_tokens - num_running), 1
            ),
        )

    def of_arrival(self, request: Request, demand: Demand) -> tuple[Load, QueuedAhead]:
        """Return the load and the queue ahead of a request that is about to join the queue."""
        queue = self._queue
        ahead = queue.ahead_of(request, demand.num_prefill_tokens, is_light=True)
        shares = self._light_beside(request, demand, ahead)
        load = self._before(self.load(), request, demand, ahead, shares)
        if shares is None:
            ahead = queue.ahead_of(request, demand.num_prefill_tokens)
        return load, ahead

    def of_admission(self, request: Request, demand: Demand) -> Load:
        """Return the load that runs together with a request about to get a slot."""
        shares = self._light_beside(request, demand, QueuedAhead())
        return self._before(self.load(has_place=True), request, demand, QueuedAhead(), shares)

    def _before(
        self,
        load: Load,
        request: Request,
        demand: Demand,
        ahead: QueuedAhead,
        shares: FairShare | None,
    ) -> Load:
        """Return the part of `load` ahead of a request; `shares`: set if its tenant is light in
        them.

        Prompts in progress share the budget with it while both last. Prompts whose first token is
        due no later may need all of the budget (forecast.py), and count whole.
        """
        under_way = self._running.prefilling()
        if shares is not None:
            under_way = [one for one in under_way if shares.is_light(one.tenant)]
            load = self._with_place(load, demand, ahead)
        due_s, num_own = deadlines_of(request).ttft_s, demand.num_prefill_tokens
        num_before = sum(
            num if deadlines_of(one).ttft_s <= due_s != NO_TIME else min(num, num_own)
            for one, num in zip(under_way, self._nums_left(under_way), strict=True)
        )
        if num_before == load.num_prefill_tokens:
            return load
        return replace(load, num_prefill_tokens=num_before)

    def _light_beside(
        self, request: Request, demand: Demand, ahead: QueuedAhead
    ) -> FairShare | None:
        """Return the shares if the request's tenant is light in them, else None."""
        tenants, name = self._tenants, request.spec.tenant
        if not (self._serves_light and tenants.has_others(name)):
            return None
        shares = FairShare(self._arrays, self._cache, self._running, tenants, self._yield_ratio)
        num_slots = ahead.num_requests + 1
        num_blocks = ahead.num_blocks + demand.num_blocks
        index = tenants.index_of(name)
        if index is None:
            weight = tenants.weight_of(name)
            is_light = shares.would_be_light(weight, num_slots=num_slots, num_blocks=num_blocks)
        else:
            is_light = shares.is_light(index, num_slots=num_slots, num_blocks=num_blocks)
        return shares if is_light else None

    def _with_place(self, load: Load, demand: Demand, ahead: QueuedAhead) -> Load:
        """Return the load after the preemptions that admit the request and those ahead, where
        allowed.
        """
        if not self._preempts_for_tenants:
            return load
        return replace(
            load,
            num_free_slots=max(load.num_free_slots, ahead.num_requests + 1),
            num_free_blocks=max(load.num_free_blocks, ahead.num_blocks + demand.num_blocks),
        )

    def _nums_left(self, prefilling: list[Request]) -> list[int]:
        """Return how many tokens each of the requests must still compute before it decodes."""
        if not prefilling:
            return []
        slots = [request.slot for request in prefilling]
        num_left = self._arrays.num_tokens[slots] - self._arrays.num_computed[slots]
        return [int(num) for num in num_left]
