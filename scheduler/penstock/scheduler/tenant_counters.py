"""Counts the service that each tenant has received.

Manages the table of tenants: weighted service, numbers of waiting and running requests, and removal
of idle tenants. The service counters are the virtual token counters of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024), with their weights.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.config import SchedulerConfig

MAX_IDLE_TENANTS = 1024
"""Maximum number of tenants without live requests whose counters are kept; those idle for longest
are dropped first.
"""
REBASE_AT = 2.0**40
"""Weighted tokens at which counters are rebased near zero: only their differences matter."""
_FIRST_CAPACITY = 16


class TenantCounters:
    """The received service, the weight and the numbers of requests of each tenant; an index
    identifies a tenant while it has live requests.

    `service` float64 [capacity]: weighted tokens served, divided by the tenant's weight. A prompt
    is charged when it is first admitted, without its cached prefix. Recomputation after a
    preemption is not charged, because the tenant did not cause it. Output is charged as it is
    generated. `weight` float64 [capacity]; `num_waiting`, `num_running`: the numbers of requests,
    by tenant index. `epoch` is incremented when counters are rebased; copies of their values are
    then invalid.

    The mark is the highest value so far of the lowest counter among waiting tenants. When a tenant
    that has no waiting request submits one, its counter is raised to at least the mark minus
    `tenant_burst_tokens`, so unused service is credited only up to that amount. An unknown tenant
    starts at the mark, so that a new name has no advantage.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._weights = config.tenant_weights
        self._default_weight = 1.0
        self._prompt_weight = config.prompt_token_weight
        self._output_weight = config.output_token_weight
        self._max_running = config.max_num_running_per_tenant
        self._burst_tokens = config.tenant_burst_tokens
        self._index_of: dict[str, int] = {}
        self._name_of: list[str | None] = []
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        # (counter, ticket, index), lowest first. An entry may be lower than the counter, which only
        # grows. It is stale if the tenant has another ticket.
        self._backlog: list[tuple[float, int, int]] = []
        self._tickets = itertools.count(1)
        self._ticket_of: list[int] = []
        # The tenant whose queue became empty last, and its counter after it was dropped from the
        # table.
        self._last_index = -1
        self._last_service = 0.0
        self.num_waiting: list[int] = []
        self.num_running: list[int] = []
        # The highest value so far of the lowest counter among waiting tenants.
        self._mark = 0.0
        self.service: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        self.weight: NDArray[np.float64] = np.ones(_FIRST_CAPACITY)
        self._output_price: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._index_of)

    @property
    def num_live(self) -> int:
        """Number of tenants with waiting or running requests."""
        return len(self._index_of) - len(self._idle)

    def has_others(self, name: str) -> bool:
        """Return whether a tenant other than `name` has waiting or running requests."""
        index = self._index_of.get(name)
        is_live = index is not None and index not in self._idle
        return self.num_live > is_live

    def num_waiting_of(self, name: str) -> int:
        """Return how many requests of a tenant wait."""
        index = self._index_of.get(name)
        return 0 if index is None else self.num_waiting[index]

    def index_of(self, name: str) -> int | None:
        """Return the index of a tenant; None for an unknown one."""
        return self._index_of.get(name)

    def weight_of(self, name: str) -> float:
        """Return the weight of a tenant. The tenant need not be in the table."""
        return self._weights.get(name, self._default_weight)

    def is_at_limit(self, index: int) -> bool:
        """Return whether a tenant is at its running limit."""
        return self._max_running is not None and self.num_running[index] >= self._max_running

    def join(self, name: str) -> int:
        """Count one more waiting request of a tenant; return the tenant's index."""
        index = self._index_of.get(name)
        if index is None or not self.num_waiting[index]:
            # The lowest counter of the other tenants: computed before this one is counted.
            self._mark = max(self._mark, self._lowest_waiting())
        if index is None:
            index = self._add(name)
            self.service[index] = self._mark
        if not self.num_waiting[index]:
            least = self._mark - self._burst_tokens
            self.service[index] = max(float(self.service[index]), least)
            self._idle.pop(index, None)
            self._push_waiting(index)
        self.num_waiting[index] += 1
        return index

    def leave(self, index: int) -> None:
        """Decrement a tenant's number of waiting requests."""
        self.num_waiting[index] -= 1
        if not self.num_waiting[index]:
            self._last_index = index
            self._ticket_of[index] = 0
            self._mark_idle(index)

    def start(self, index: int) -> None:
        """Increment a tenant's number of running requests."""
        self.num_running[index] += 1
        self._idle.pop(index, None)

    def stop(self, index: int) -> bool:
        """Decrement a tenant's number of running requests; return whether the tenant was at its
        running limit and no longer is.
        """
        was_at_limit = self.is_at_limit(index)
        self.num_running[index] -= 1
        self._mark_idle(index)
        return was_at_limit and not self.is_at_limit(index)

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        """Replace all weights; recorded service is not recomputed."""
        self._weights, self._default_weight = dict(weights), default
        for index in self._index_of.values():
            self._update_weight(index)

    def prompt_price(self, index: int) -> float:
        """Return how much one prompt token adds to a tenant's service counter."""
        return self._prompt_weight / float(self.weight[index])

    def charge_prompt(self, index: int, num_tokens: int) -> None:
        """Add `num_tokens` prompt tokens to a tenant's service, when they are about to be computed
        for the first time; may rebase all counters (see `epoch`).
        """
        self.service[index] += num_tokens * self.prompt_price(index)
        if self.service[index] > REBASE_AT:
            self._rebase()

    def charge_outputs(self, indices: NDArray[np.int32]) -> None:
        """Add one output token to the service of each tenant in `indices` int32 [m], once per
        entry.
        """
        count = len(self._name_of)
        served = np.bincount(indices, minlength=count)
        self.service[:count] += served * self._output_price[:count]

    def faults(self) -> list[str]:
        """Return the inconsistencies of the table, given only its own data."""
        found: list[str] = []
        count = len(self._name_of)
        if not (np.isfinite(self.service).all() and (self.service >= 0.0).all()):
            found.append("a tenant's service is NaN")
        if len(self._idle) > MAX_IDLE_TENANTS or len(self._backlog) > 2 * count + 64:
            found.append("the table of tenants exceeds its bound")
        for name, index in self._index_of.items():
            is_idle = not (self.num_waiting[index] or self.num_running[index])
            if is_idle is not (index in self._idle):
                found.append(f"tenant {name!r} is marked idle inconsistently")
        return found

    def _add(self, name: str) -> int:
        index = self._free.pop() if self._free else len(self._name_of)
        if index == len(self._name_of):
            self._name_of.append(None)
            self._ticket_of.append(0)
            self.num_waiting.append(0)
            self.num_running.append(0)
            if index == len(self.service):
                self.service = np.concatenate((self.service, np.zeros(index)))
                self._output_price = np.concatenate((self._output_price, np.zeros(index)))
                self.weight = np.concatenate((self.weight, np.ones(index)))
        self._index_of[name] = index
        self._name_of[index] = name
        self.service[index] = 0.0
        self._update_weight(index)
        return index

    def _update_weight(self, index: int) -> None:
        self.weight[index] = weight = self.weight_of(self._name_of[index] or "")
        self._output_price[index] = self._output_weight / weight

    def _mark_idle(self, index: int) -> None:
        if self.num_waiting[index] or self.num_running[index]:
            return
        self._idle[index] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            dropped, _ = self._idle.popitem(last=False)
            name = self._name_of[dropped]
            if name is not None:
                del self._index_of[name]
            self._name_of[dropped] = None
            if dropped == self._last_index:
                self._last_index, self._last_service = -1, float(self.service[dropped])
            self._free.append(dropped)

    def _lowest_waiting(self) -> float:
        """Return the smallest counter among waiting tenants; if none waits, the counter of the last
        one that waited.
        """
        backlog = self._backlog
        while backlog:
            stored, ticket, index = backlog[0]
            if ticket != self._ticket_of[index]:
                heapq.heappop(backlog)
            elif stored < self.service[index]:
                heapq.heapreplace(backlog, (float(self.service[index]), ticket, index))
            else:
                return stored
        return self._last_service if self._last_index < 0 else float(self.service[self._last_index])

    def _rebase(self) -> None:
        base = self._lowest_waiting() - self._burst_tokens
        if base < REBASE_AT / 2:
            return
        np.maximum(self.service - base, 0.0, out=self.service)
        self._last_service = max(self._last_service - base, 0.0)
        self._mark = max(self._mark - base, 0.0)
        self._rebuild()
        self.epoch += 1

    def _push_waiting(self, index: int) -> None:
        self._ticket_of[index] = ticket = next(self._tickets)
        heapq.heappush(self._backlog, (float(self.service[index]), ticket, index))
        if len(self._backlog) > 2 * len(self._name_of) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._backlog = [
            (float(self.service[index]), ticket, index)
            for _, ticket, index in self._backlog
            if ticket == self._ticket_of[index]
        ]
        heapq.heapify(self._backlog)
