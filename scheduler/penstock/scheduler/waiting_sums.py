"""Sums over waiting requests: by class, by tenant, and by deadline.

Owns the account from which forecasts for new requests are made. Updated with every request that
joins or leaves; never iterates over the queue. Does not know the order itself, only its rules:
classes, tenants by weight, and inside a tenant the earliest deadline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from penstock.scheduler.forecast import QueuedAhead
from penstock.scheduler.request import NO_TIME, Request

_BUCKET_S = 0.125
"""Requests due within the same eighth of a second count as ahead."""


@dataclass(slots=True)
class _Sum:
    """`num_kept_tokens`: the blocks that the admission of all requests takes, in tokens.

    `num_output_tokens`: tokens that all are expected to generate.
    """

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_kept_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, other: "_Sum", times: float = 1.0) -> None:
        self.num_requests += math.ceil(times * other.num_requests)
        self.num_prefill_tokens += int(times * other.num_prefill_tokens)
        self.num_kept_tokens += int(times * other.num_kept_tokens)
        self.num_output_tokens += int(times * other.num_output_tokens)

    def take(self, other: "_Sum") -> None:
        self.num_requests -= other.num_requests
        self.num_prefill_tokens -= other.num_prefill_tokens
        self.num_kept_tokens -= other.num_kept_tokens
        self.num_output_tokens -= other.num_output_tokens


@dataclass(slots=True)
class _Line:
    """One tenant's part of a class. `last_due`: no bucket of the line is later."""

    weight: float
    last_due: int = 0
    all: _Sum = field(default_factory=_Sum)
    by_due: dict[int, _Sum] = field(default_factory=dict[int, _Sum])

    def due_by(self, bucket: int) -> _Sum:
        """Return the sum of requests due no later; cheap for the last bucket, or without a
        deadline.
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
    lines: dict[str, _Line] = field(default_factory=dict[str, _Line])


class WaitingSums:
    """Sums over the requests in the order."""

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self._is_fair = config.order is SchedulingOrder.FAIR
        self._aging_s = config.aging_s
        self._weights, self._default_weight = config.tenant_weights, 1.0
        self._block_size = block_size
        self._classes: dict[int, _Class] = {}
        self._entries: dict[int, tuple[_Sum, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def set_weights(self, weights: Mapping[str, float], default: float) -> None:
        """Replace the tenants' weights; `default` applies to those that `weights` does not name."""
        self._weights, self._default_weight = dict(weights), default
        for of_class in self._classes.values():
            for tenant, line in of_class.lines.items():
                line.weight = self._weight_of(tenant)
            of_class.weight = sum(line.weight for line in of_class.lines.values())

    def add(self, request: Request, due_s: float) -> None:
        """Add a request that enters the order."""
        entry = _Sum(
            1,
            request.num_uncached_tokens,
            request.num_kept_tokens,
            request.num_expected_tokens,
        )
        spec = request.spec
        of_class = self._classes.setdefault(spec.priority, _Class())
        line = of_class.lines.get(spec.tenant)
        if line is None:
            line = of_class.lines[spec.tenant] = _Line(self._weight_of(spec.tenant))
            of_class.weight += line.weight
        bucket = self._bucket(request, due_s)
        line.last_due = max(line.last_due, bucket)
        for total in (of_class.all, line.all, line.by_due.setdefault(bucket, _Sum())):
            total.add(entry)
        self._entries[spec.key] = (entry, bucket)

    def remove(self, request: Request) -> None:
        """Remove a request that leaves the order; a no-op if it is not in it."""
        known = self._entries.pop(request.spec.key, None)
        if known is None:
            return
        entry, bucket = known
        spec = request.spec
        of_class = self._classes[spec.priority]
        line = of_class.lines[spec.tenant]
        for total in (of_class.all, line.all, line.by_due[bucket]):
            total.take(entry)
        if not line.by_due[bucket].num_requests:
            del line.by_due[bucket]
        if not line.all.num_requests:
            del of_class.lines[spec.tenant]
            of_class.weight -= line.weight
        if not of_class.all.num_requests:
            del self._classes[spec.priority]

    def has_line(self, request: Request) -> bool:
        """Whether other requests of its class wait; in fair order, also of its tenant."""
        of_class = self._classes.get(request.spec.priority)
        if of_class is None:
            return False
        return not self._is_fair or request.spec.tenant in of_class.lines

    def ahead_of(
        self, request: Request, due_s: float, num_prefill: int, *, is_light: bool = False
    ) -> QueuedAhead:
        """Return the requests likely to go before one that is not in the order yet.

        These are higher classes and, within the tenant's part of the class, requests due no later
        (in arrival order: all of the class). While these and the request's own `num_prefill` tokens
        are served, tenants share by weight: other tenants of the class are expected to get weight
        of the others / own weight as much, at most what they have waiting. `is_light`: no request
        of other tenants in the class goes before those of its tenant (fair_share.py).
        """
        total, spec = _Sum(), request.spec
        for priority, of_class in self._classes.items():
            if priority > spec.priority:
                total.add(of_class.all)
        mine = self._classes.get(spec.priority)
        if mine is None:
            return self._ahead(total)
        if not self._is_fair:
            total.add(mine.all)
            return self._ahead(total)
        own, own_all, weight = _Sum(), _Sum(), self._weight_of(spec.tenant)
        others_weight = mine.weight
        line = mine.lines.get(spec.tenant)
        if line is not None:
            own_all = line.all
            own = line.due_by(self._bucket(request, due_s))
            others_weight -= line.weight
        total.add(own)
        if is_light:
            return self._ahead(total)
        others = _Sum()
        others.add(mine.all)
        others.take(own_all)
        if others.num_prefill_tokens > 0:
            served = (own.num_prefill_tokens + num_prefill) * max(others_weight, 0.0) / weight
            total.add(others, min(1.0, served / others.num_prefill_tokens))
        return self._ahead(total)

    def faults(self) -> list[str]:
        """Return the inconsistencies."""
        total = _Sum()
        for entry, _ in self._entries.values():
            total.add(entry)
        summed = _Sum()
        for of_class in self._classes.values():
            summed.add(of_class.all)
        lines = _Sum()
        buckets = _Sum()
        for of_class in self._classes.values():
            for line in of_class.lines.values():
                lines.add(line.all)
                for bucket in line.by_due.values():
                    buckets.add(bucket)
        return [] if total == summed == lines == buckets else ["the sums of the queue are off"]

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, self._default_weight)

    def _bucket(self, request: Request, due_s: float) -> int:
        # As in the fair order, a deadline counts as no later than this.
        due_s = min(due_s, request.spec.arrival_s + self._aging_s)
        return int(due_s // _BUCKET_S) if due_s != NO_TIME else 2**62

    def _ahead(self, total: _Sum) -> QueuedAhead:
        return QueuedAhead(
            num_requests=total.num_requests,
            num_prefill_tokens=total.num_prefill_tokens,
            num_blocks=-(-total.num_kept_tokens // self._block_size),
            num_output_tokens=total.num_output_tokens,
        )
