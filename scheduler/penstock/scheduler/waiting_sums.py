"""Keeps totals of the waiting requests, by class, by tenant and by deadline.

Used to forecast queue times of new requests. The totals are updated when a request joins or leaves
the queue, without iterating over the queue. They follow the rules of the queue order: classes,
tenants by weight, and inside a tenant the earliest deadline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.forecast import QueuedAhead
from penstock.scheduler.request import NO_TIME, Request

_BUCKET_S = 0.125
"""Width of a deadline bucket, seconds; requests in the same bucket count as ahead."""


@dataclass(slots=True)
class _Sum:
    """Totals of a group of requests. `num_blocks`: blocks that their admission takes;
    `num_output_tokens`: tokens that they are expected to generate.
    """

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0
    num_output_tokens: int = 0

    def add(self, other: "_Sum", times: float = 1.0) -> None:
        self.num_requests += math.ceil(times * other.num_requests)
        self.num_prefill_tokens += int(times * other.num_prefill_tokens)
        self.num_blocks += int(times * other.num_blocks)
        self.num_output_tokens += int(times * other.num_output_tokens)

    def subtract(self, other: "_Sum") -> None:
        self.num_requests -= other.num_requests
        self.num_prefill_tokens -= other.num_prefill_tokens
        self.num_blocks -= other.num_blocks
        self.num_output_tokens -= other.num_output_tokens


@dataclass(slots=True)
class _TenantSums:
    """The totals of one tenant's waiting requests in one priority class. `last_due`: the latest
    deadline bucket.
    """

    weight: float
    last_due: int = 0
    all: _Sum = field(default_factory=_Sum)
    by_due: dict[int, _Sum] = field(default_factory=dict[int, _Sum])

    def due_by(self, bucket: int) -> _Sum:
        """Return the sum of the requests due in `bucket` or earlier.

        Takes constant time for the last bucket and for requests without a deadline.
        """
        if bucket >= self.last_due:
            return self.all
        total = _Sum()
        for due, one in self.by_due.items():
            if due <= bucket:
                total.add(one)
        return total


@dataclass(slots=True)
class _Class:
    all: _Sum = field(default_factory=_Sum)
    weight: float = 0.0
    tenants: dict[str, _TenantSums] = field(default_factory=dict[str, _TenantSums])


class WaitingSums:
    """Sums over the waiting requests that may be admitted."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._is_fair = config.order is SchedulingOrder.FAIR
        self._aging_s = config.aging_s
        self._weights, self._default_weight = config.tenant_weights, 1.0
        self._classes: dict[int, _Class] = {}
        self._entries: dict[int, tuple[_Sum, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def set_weights(self, weights: Mapping[str, float], default: float) -> None:
        """Replace the tenants' weights; `default` applies to tenants that are not in `weights`."""
        self._weights, self._default_weight = dict(weights), default
        for of_class in self._classes.values():
            for tenant, of_tenant in of_class.tenants.items():
                of_tenant.weight = self._weight_of(tenant)
            of_class.weight = sum(of_tenant.weight for of_tenant in of_class.tenants.values())

    def add(self, request: Request, due_s: float) -> None:
        """Add a request that may now be admitted; `due_s`: its earliest deadline or time limit."""
        entry = _Sum(
            1,
            request.num_uncached_tokens,
            request.num_blocks,
            request.num_expected_tokens,
        )
        spec = request.spec
        of_class = self._classes.setdefault(spec.priority, _Class())
        of_tenant = of_class.tenants.get(spec.tenant)
        if of_tenant is None:
            of_tenant = of_class.tenants[spec.tenant] = _TenantSums(self._weight_of(spec.tenant))
            of_class.weight += of_tenant.weight
        bucket = self._bucket(request, due_s)
        of_tenant.last_due = max(of_tenant.last_due, bucket)
        for total in (of_class.all, of_tenant.all, of_tenant.by_due.setdefault(bucket, _Sum())):
            total.add(entry)
        self._entries[spec.key] = (entry, bucket)

    def remove(self, request: Request) -> None:
        """Remove a request that leaves the queue; a no-op if it is not in the sums."""
        known = self._entries.pop(request.spec.key, None)
        if known is None:
            return
        entry, bucket = known
        spec = request.spec
        of_class = self._classes[spec.priority]
        of_tenant = of_class.tenants[spec.tenant]
        for total in (of_class.all, of_tenant.all, of_tenant.by_due[bucket]):
            total.subtract(entry)
        if not of_tenant.by_due[bucket].num_requests:
            del of_tenant.by_due[bucket]
        if not of_tenant.all.num_requests:
            del of_class.tenants[spec.tenant]
            of_class.weight -= of_tenant.weight
        if not of_class.all.num_requests:
            del self._classes[spec.priority]

    def has_queue(self, request: Request) -> bool:
        """Return whether other requests of the same class wait (in fair order: of the same class
        and tenant).
        """
        of_class = self._classes.get(request.spec.priority)
        if of_class is None:
            return False
        return not self._is_fair or request.spec.tenant in of_class.tenants

    def ahead_of(
        self, request: Request, due_s: float, num_prefill: int, *, is_under_share: bool = False
    ) -> QueuedAhead:
        """Return totals of the requests likely to go before a new request.

        These are the requests of higher classes and the tenant's requests in the same class that
        are due at the same time or earlier (in arrival order: the whole class). While the tenant's
        earlier requests and the request's own `num_prefill` tokens are served, tenants share by
        weight: the other tenants of the class are expected to get (their weight / own weight) times
        as many tokens, at most the tokens that they have waiting. `is_under_share`: no request of
        other tenants in the class goes before the requests of its tenant (fair_share.py).
        """
        total, spec = _Sum(), request.spec
        for priority, of_class in self._classes.items():
            if priority > spec.priority:
                total.add(of_class.all)
        own_class = self._classes.get(spec.priority)
        if own_class is None:
            return _ahead(total)
        if not self._is_fair:
            total.add(own_class.all)
            return _ahead(total)
        own, own_all, weight = _Sum(), _Sum(), self._weight_of(spec.tenant)
        others_weight = own_class.weight
        of_tenant = own_class.tenants.get(spec.tenant)
        if of_tenant is not None:
            own_all = of_tenant.all
            own = of_tenant.due_by(self._bucket(request, due_s))
            others_weight -= of_tenant.weight
        total.add(own)
        if is_under_share:
            return _ahead(total)
        others = _Sum()
        others.add(own_class.all)
        others.subtract(own_all)
        if others.num_prefill_tokens > 0:
            served = (own.num_prefill_tokens + num_prefill) * max(others_weight, 0.0) / weight
            total.add(others, min(1.0, served / others.num_prefill_tokens))
        return _ahead(total)

    def faults(self) -> list[str]:
        """Return the inconsistencies of the sums."""
        total = _Sum()
        for entry, _ in self._entries.values():
            total.add(entry)
        summed = _Sum()
        for of_class in self._classes.values():
            summed.add(of_class.all)
        tenants = _Sum()
        buckets = _Sum()
        for of_class in self._classes.values():
            for of_tenant in of_class.tenants.values():
                tenants.add(of_tenant.all)
                for bucket in of_tenant.by_due.values():
                    buckets.add(bucket)
        return [] if total == summed == tenants == buckets else ["the sums of the queue are wrong"]

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, self._default_weight)

    def _bucket(self, request: Request, due_s: float) -> int:
        # As in the fair order, a deadline counts as at most this time.
        due_s = min(due_s, request.spec.arrival_s + self._aging_s)
        return int(due_s // _BUCKET_S) if due_s != NO_TIME else 2**62


def _ahead(total: _Sum) -> QueuedAhead:
    return QueuedAhead(
        num_requests=total.num_requests,
        num_prefill_tokens=total.num_prefill_tokens,
        num_blocks=total.num_blocks,
        num_output_tokens=total.num_output_tokens,
    )
