"""Selects the waiting requests that are displaced when the queue is full.

Computes each tenant's share of the queue and the order in which its requests are displaced. Does
not end them. A tenant's share is its dominant share (Ghodsi et al., "Dominant Resource Fairness",
NSDI 2011) of the two bounds of the queue, requests and prompt tokens, divided by its weight.

An arriving request displaces requests of the tenant with the largest share, as long as that
tenant's share stays at least as large as the new share of the arriving tenant. It also displaces a
single request that is larger than its tenant's fair share, if the arriving tenant stays within its
fair share, so that one request with many outputs does not block others. The fair share is the
tenant's weighted part of the exceeded bound, among all waiting tenants and the arriving one; it is
at least one request. If no other tenant's request can be displaced, the arriving request displaces
lower-class requests of the arriving tenant. Within a tenant, the lowest class is displaced first,
and within the class the request submitted last. So if a tenant floods the queue, only requests of
that tenant are displaced, and a tenant is rejected only if no other tenant has a larger share.

A request is not displaced after one of its outputs was admitted. To bound the work, one arriving
request displaces at most `MAX_DISPLACED` requests.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.request import Request
from penstock.scheduler.tenant_counters import TenantCounters

MAX_DISPLACED = 32


class Displacement:
    """Tracks each tenant's share of the queue, and the waiting requests that may be displaced."""

    def __init__(self, config: SchedulerConfig, tenants: TenantCounters) -> None:
        self._limits = (config.max_num_waiting, config.max_num_waiting_tokens)
        self._tenants = tenants
        # Waiting requests and prompt tokens, by tenant: float64 [2, capacity].
        self._held: NDArray[np.float64] = np.zeros((2, len(tenants.service)))
        # The outputs of each request without an admitted output, by tenant, class and leader's key.
        self._displaceable: dict[int, dict[int, dict[int, tuple[Request, ...]]]] = {}
        self._leader_of: dict[int, int] = {}

    def join(self, request: Request) -> None:
        """Add an output that starts to wait, on arrival or after a preemption."""
        while request.tenant >= self._held.shape[1]:
            self._held = np.concatenate((self._held, np.zeros_like(self._held)), axis=1)
        self._held[:, request.tenant] += (1.0, len(request.tokens))

    def note_submitted(self, outputs: Sequence[Request]) -> None:
        """Record the outputs of one request, in order; while all of them wait, they may be
        displaced together.
        """
        leader = outputs[0]
        by_class = self._displaceable.setdefault(leader.tenant, {})
        by_class.setdefault(leader.spec.priority, {})[leader.spec.key] = tuple(outputs)
        self._leader_of.update((output.spec.key, leader.spec.key) for output in outputs)

    def leave(self, request: Request) -> None:
        """Remove `request` (one output of a client request), because it no longer waits.

        The other outputs of the client request may no longer be displaced either.
        """
        self._held[:, request.tenant] -= (1.0, len(request.tokens))
        leader_key = self._leader_of.get(request.spec.key)
        if leader_key is None:
            return
        by_class = self._displaceable[request.tenant]
        units = by_class[request.spec.priority]
        for output in units.pop(leader_key):
            del self._leader_of[output.spec.key]
        if not units:
            del by_class[request.spec.priority]
            if not by_class:
                del self._displaceable[request.tenant]

    def displaced_by(
        self, outputs: Sequence[Request], num_requests: int, num_tokens: int
    ) -> list[tuple[Request, ...]] | None:
        """Return the requests to displace, each as a tuple of its outputs, so that the arriving
        `outputs` fit, or None if `outputs` must be rejected.

        The displaced requests free at least `num_requests` entries and `num_tokens` prompt tokens
        of the queue.
        """
        spec = outputs[0].spec
        own = self._tenants.index_of(spec.tenant)
        held = self._held.copy()
        weight = self._tenants.weight[: held.shape[1]]
        limits = np.array(self._limits, dtype=np.float64)[:, np.newaxis]
        wanted = np.array((len(outputs), sum(len(output.tokens) for output in outputs)), np.float64)
        if own is not None:
            wanted += held[:, own]
            held[:, own] = 0.0
        own_weight = self._tenants.weight_of(spec.tenant)
        own_part = float((wanted / limits[:, 0]).max()) / own_weight
        # Requests and tokens per unit of weight.
        fair = limits[:, 0] / (own_weight + float(weight[held[0] > 0.0].sum()))
        is_within_fair_share = not _exceeds(wanted, fair * own_weight).any()
        chosen: list[tuple[Request, ...]] = []
        keys: set[int] = set()
        while num_requests > 0 or num_tokens > 0:
            parts = (held / limits).max(axis=0) / weight
            # A tenant without displaceable requests is skipped.
            parts[
                [
                    index
                    for index in np.flatnonzero(parts).tolist()
                    if self._has_no_candidate(index, keys)
                ]
            ] = 0.0
            largest = int(parts.argmax())
            unit = next(self._in_displacement_order(largest, keys), None)
            size = np.zeros(2) if unit is None else _size(unit)
            left = held[:, largest] - size
            is_short = (num_requests > 0, num_tokens > 0)
            if unit is not None and (
                (left / limits[:, 0]).max() / weight[largest] >= own_part
                or (
                    is_within_fair_share
                    and (_exceeds(size, fair * weight[largest]) & is_short).any()
                )
            ):
                held[:, largest] = left
            else:
                unit = None if own is None else next(self._in_displacement_order(own, keys), None)
                if unit is None or unit[0].spec.priority >= spec.priority:
                    return None
            if len(chosen) == MAX_DISPLACED:
                return None
            chosen.append(unit)
            keys.add(unit[0].spec.key)
            num_requests -= len(unit)
            num_tokens -= sum(len(output.tokens) for output in unit)
        return chosen

    def _has_no_candidate(self, tenant: int, chosen: set[int]) -> bool:
        return next(self._in_displacement_order(tenant, chosen), None) is None

    def _in_displacement_order(
        self, tenant: int, chosen: set[int]
    ) -> Iterator[tuple[Request, ...]]:
        """Yield the requests of a tenant that may be displaced: the lowest priority class first,
        within a class the request submitted last first. Requests whose leader's key is in `chosen`
        are left out.
        """
        by_class = self._displaceable.get(tenant, {})
        for priority in sorted(by_class):
            for key, unit in reversed(by_class[priority].items()):
                if key not in chosen:
                    yield unit

    def faults(self, waiting: Sequence[Request]) -> list[str]:
        """Return the inconsistencies of the recorded shares, given every waiting request."""
        held = np.zeros_like(self._held)
        for request in waiting:
            held[:, request.tenant] += (1.0, len(request.tokens))
        found: list[str] = []
        if not np.array_equal(held, self._held):
            found.append("the tenants' shares of the queue are miscounted")
        keys = {request.spec.key for request in waiting}
        if not self._leader_of.keys() <= keys:
            found.append("a request that does not wait is listed as displaceable")
        return found


def _size(unit: Sequence[Request]) -> NDArray[np.float64]:
    return np.array((len(unit), sum(len(output.tokens) for output in unit)), np.float64)


def _exceeds(size: NDArray[np.float64], fair: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return two flags, bool [2]: whether a number of requests and a number of tokens exceed a
    tenant's fair share.

    `size` and `fair` contain the number of requests and the number of tokens, in this order. The
    fair share is at least one request.
    """
    return size > np.maximum(fair, (1.0, 0.0))
