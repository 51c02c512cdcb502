"""Computes metrics from heartbeats of fronts (gRPC server processes) and records of ended requests.

Requests are counted from heartbeats, because records may be lost. The counts are totals over all
fronts that have ever run. When a front dies, its counts are kept, including records newer than its
last heartbeat, and its gauges are removed. Records update the histograms, the counts of tenants,
and other counters that heartbeats do not have.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from penstock.server.observe.frames import Heartbeat, OutcomeCount
from penstock.server.observe.metrics import catalogue, labels
from penstock.server.observe.metrics.catalogue import MetricSpec
from penstock.server.observe.metrics.tables import MetricTables
from penstock.server.observe.request_record import ENGINE_LOST, RequestRecord, SegmentKind

_MAX_DISCONNECTED = 256
"""Maximum number of disconnected fronts whose counts are kept, because a front may reconnect."""
Series = tuple[MetricSpec, tuple[str, ...]]
_PHASES: Final[Mapping[SegmentKind, MetricSpec]] = {
    SegmentKind.PREPARE: catalogue.PREPARE_SECONDS,
    SegmentKind.QUEUE: catalogue.QUEUE_SECONDS,
    SegmentKind.PREFILL: catalogue.PREFILL_SECONDS,
    SegmentKind.DECODE: catalogue.DECODE_SECONDS,
    SegmentKind.DELIVER: catalogue.DELIVER_SECONDS,
}
_Values = defaultdict[tuple[MetricSpec, tuple[str, ...]], list[float]]


class _FrontCounts:
    """The last heartbeat of one front, the counts of it that are already added to the tables, and
    the counts of its records."""

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self.counted: Counter[Series] = Counter()
        self.recorded: Counter[Series] = Counter()


class FrontMetrics:
    """Updates the tables from the heartbeats of the fronts. If a front ends, also from its records
    that are newer than its last heartbeat.

    `methods` are the full names of the RPC methods that carry requests; the first one has series
    from the start.
    """

    def __init__(self, tables: MetricTables, methods: Sequence[str]) -> None:
        self._tables = tables
        self._methods = methods
        self._fronts: dict[int, _FrontCounts] = {}
        self._disconnected: OrderedDict[int, _FrontCounts] = OrderedDict()
        self._drop_reasons: set[str] = set(labels.DROP_REASONS)
        for reason in (*sorted(labels.REASONS), labels.OTHER):
            tables.counter(catalogue.REQUEST_ERRORS).begin(reason)
        for reason in sorted(labels.ADMISSION_REJECTIONS):
            tables.counter(catalogue.ADMISSION_REJECTED).begin(reason)
        for reason in sorted(self._drop_reasons):
            tables.counter(catalogue.RECORDS_DROPPED).begin(reason)
        for method in methods[:1]:
            for finish_reason in sorted(labels.FINISH_REASONS):
                tables.counter(catalogue.REQUESTS).begin(method, "OK", labels.NONE, finish_reason)

    def add_records(self, records: Sequence[RequestRecord]) -> None:
        """Count the outcomes of the records by front. These counts are added to the metrics only if
        the front ends before one of its heartbeats includes them."""
        for record in records:
            end = OutcomeCount(
                method=record.method,
                code=record.code,
                reason=record.reason,
                finish_reason=record.finish_reasons[0] if record.finish_reasons else "",
                num=1,
            )
            front = self._front(record.front_id)
            front.recorded.update(_series_counts(end, self._methods))

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Increase the counters by what a front has counted since its previous heartbeat, and set
        the gauges of the fronts."""
        front = self._front(heartbeat.front_id)
        front.heartbeat = heartbeat
        self._count(front, self._counts(heartbeat))
        self._tables.histogram(catalogue.LOOP_LAG).observe(heartbeat.loop_lag_s)
        self._set_gauges()

    def front_disconnected(self, front_id: int) -> None:
        """Remove a front that has ended from the gauges, and add the counts of its records that are
        newer than its last heartbeat. Idempotent."""
        front = self._fronts.pop(front_id, None)
        if front is not None:
            self._count(front, front.recorded)
            front.heartbeat = None
            self._disconnected[front_id] = front
            if len(self._disconnected) > _MAX_DISCONNECTED:
                self._disconnected.popitem(last=False)
        self._set_gauges()

    @property
    def is_engine_up(self) -> bool:
        """True if a front is connected to an engine."""
        return any(heartbeat.is_engine_up for heartbeat in self._heartbeats())

    @property
    def epoch(self) -> int:
        """The highest engine epoch in the heartbeats of the live fronts; 0 without one."""
        return max((heartbeat.epoch for heartbeat in self._heartbeats()), default=0)

    def _front(self, front_id: int) -> _FrontCounts:
        """Return the entry of a front; create it if it is missing. A front that reconnects gets its
        previous entry, because front ids are unique."""
        if front_id not in self._fronts:
            known = front_id in self._disconnected
            self._fronts[front_id] = self._disconnected.pop(front_id) if known else _FrontCounts()
        return self._fronts[front_id]

    def _heartbeats(self) -> list[Heartbeat]:
        return [front.heartbeat for front in self._fronts.values() if front.heartbeat is not None]

    def _count(self, front: _FrontCounts, counts: "Counter[Series]") -> None:
        for (spec, names), num in counts.items():
            # Counters must not decrease.
            if (more := num - front.counted[spec, names]) > 0:
                self._tables.counter(spec).add(more, *names)
                front.counted[spec, names] = num

    def _counts(self, heartbeat: Heartbeat) -> "Counter[Series]":
        counts: Counter[Series] = Counter()
        for end in heartbeat.outcomes:
            counts += _series_counts(end, self._methods)
        counts[catalogue.SUBMITTED, ()] = heartbeat.num_submitted
        counts[catalogue.STALLED_READERS, ()] = heartbeat.num_disconnected_readers
        counts[catalogue.LATE_EVENTS, ()] = heartbeat.num_late_events
        counts[catalogue.UNKNOWN_FIELDS, ()] = heartbeat.num_unknown_fields
        counts[catalogue.LOWERED_PRIORITIES, ()] = heartbeat.num_lowered_priorities
        counts[catalogue.INTERNAL_ERRORS, ()] = heartbeat.num_internal_errors
        counts[catalogue.RECORDS, ()] = heartbeat.num_records
        for reason, num in heartbeat.dropped_records.items():
            counts[catalogue.RECORDS_DROPPED, (self._drop_reason(reason),)] += num
        return counts

    def _drop_reason(self, reason: str) -> str:
        if reason not in self._drop_reasons:
            if len(self._drop_reasons) >= labels.MAX_DROP_REASONS:
                return labels.OTHER
            self._drop_reasons.add(reason)
        return reason

    def _set_gauges(self) -> None:
        heartbeats = self._heartbeats()
        gauge = self._tables.gauge
        gauge(catalogue.FRONTS).set(len(heartbeats))
        # A single draining front is being replaced.
        is_draining = bool(heartbeats) and all(heartbeat.is_draining for heartbeat in heartbeats)
        gauge(catalogue.DRAINING).set(float(is_draining))
        gauge(catalogue.STREAMS).set(sum(heartbeat.num_streams for heartbeat in heartbeats))
        gauge(catalogue.LIVE).set(sum(heartbeat.num_live for heartbeat in heartbeats))
        gauge(catalogue.BACKLOG).set(sum(heartbeat.num_backlog_tokens for heartbeat in heartbeats))


def _series_counts(end: OutcomeCount, methods: Collection[str]) -> "Counter[Series]":
    """Return the number of requests that an outcome adds to each series of the counters of
    requests, errors and rejections."""
    reason = labels.label_of(end.reason, labels.REASONS)
    names = (
        labels.label_of(end.method, methods),
        labels.code_name(end.code),
        reason,
        labels.label_of(end.finish_reason, labels.FINISH_REASONS),
    )
    counts: Counter[Series] = Counter({(catalogue.REQUESTS, names): end.num})
    if reason != labels.NONE:
        counts[catalogue.REQUEST_ERRORS, (reason,)] += end.num
    if reason in labels.ADMISSION_REJECTIONS:
        counts[catalogue.ADMISSION_REJECTED, (reason,)] += end.num
    return counts


class RequestMetrics:
    """Updates the histograms of requests, and the counters that heartbeats do not have, from
    records.

    `tenants` are the tenants with separate series; all others share one. If `tenants` is empty,
    there are no series by tenant.
    """

    def __init__(self, tables: MetricTables, tenants: Collection[str]) -> None:
        self._tables = tables
        self._tenants = frozenset(tenants)
        for outcome in labels.OUTCOMES:
            tables.histogram(catalogue.REQUEST_SECONDS).begin(outcome)
        for reason in labels.WAIT_REASONS:
            tables.counter(catalogue.QUEUE_WAIT).begin(reason)
        for tenant in (*sorted(self._tenants), *((labels.OTHER,) if tenants else ())):
            for outcome in labels.OUTCOMES:
                tables.counter(catalogue.TENANT_REQUESTS).begin(tenant, outcome)
            for spec in (
                catalogue.TENANT_PROMPT_TOKENS,
                catalogue.TENANT_GENERATION_TOKENS,
                catalogue.TENANT_QUEUE,
            ):
                tables.counter(spec).begin(tenant)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Add the records of ended requests. Each series of a histogram is updated once per
        call."""
        values: _Values = defaultdict(list)
        for record in records:
            self._read(record, values)
        for (spec, names), observed in values.items():
            self._tables.histogram(spec).observe(observed, *names)

    def _read(self, record: RequestRecord, values: _Values) -> None:
        finish_reason = record.finish_reasons[0] if record.finish_reasons else ""
        outcome = labels.outcome(record.code, finish_reason)
        values[catalogue.REQUEST_SECONDS, (outcome,)].append(record.end_s - record.arrival_s)
        values[catalogue.TTFT, ()].append(record.ttft_s)
        values[catalogue.TPOT, ()].append(time_per_output_token_s(record))
        phases = _phase_seconds(record)
        for kind, seconds in phases.items():
            values[_PHASES[kind], ()].append(seconds)
        if record.stalled_s > 0:
            values[catalogue.STALLED_SECONDS, ()].append(record.stalled_s)
        if record.num_messages:
            values[catalogue.MESSAGES_EACH, ()].append(record.num_messages)
        if SegmentKind.QUEUE in phases:
            values[catalogue.PROMPT_TOKENS_EACH, ()].append(record.num_prompt_tokens)
        if record.num_completion_tokens:
            values[catalogue.GENERATION_TOKENS_EACH, ()].append(record.num_completion_tokens)
        self._count(record, phases)
        if self._tenants:
            self._count_tenant(record, outcome, phases)

    def _count(self, record: RequestRecord, phases: Mapping[SegmentKind, float]) -> None:
        counter = self._tables.counter
        counter(catalogue.STALLS).add(record.num_stalls)
        counter(catalogue.REPLAYS).add(record.num_replays)
        # Requests that were never admitted were not looked up in the cache.
        if SegmentKind.PREFILL in phases or SegmentKind.DECODE in phases:
            counter(catalogue.PROMPT_TOKENS).add(record.num_prompt_tokens)
            counter(catalogue.PREFIX_QUERIES).add(record.num_prompt_tokens)
            counter(catalogue.PREFIX_HITS).add(record.num_cached_tokens)
        waited = counter(catalogue.QUEUE_WAIT)
        for segment in record.segments:
            if segment.is_engine_lost:
                waited.add(segment.end_s - segment.start_s, ENGINE_LOST)
            if (wait := segment.wait) is None:
                continue
            waited.add(wait.blocks_s, "blocks")
            waited.add(wait.slots_s, "slots")
            waited.add(wait.token_budget_s, "token_budget")
            waited.add(wait.fairness_s, "fairness")
            waited.add(wait.other_s, labels.OTHER)

    def _count_tenant(
        self, record: RequestRecord, outcome: str, phases: Mapping[SegmentKind, float]
    ) -> None:
        tenant = record.tenant if record.tenant in self._tenants else labels.OTHER
        counter = self._tables.counter
        counter(catalogue.TENANT_REQUESTS).add(1, tenant, outcome)
        counter(catalogue.TENANT_PROMPT_TOKENS).add(record.num_prompt_tokens, tenant)
        counter(catalogue.TENANT_GENERATION_TOKENS).add(record.num_completion_tokens, tenant)
        counter(catalogue.TENANT_QUEUE).add(phases.get(SegmentKind.QUEUE, 0.0), tenant)


def time_per_output_token_s(record: RequestRecord) -> float:
    """Return (duration - TTFT) / (n - 1) in seconds, where n is the mean number of tokens per
    output; NaN if n is at most 1.

    This is the definition of OpenTelemetry's `gen_ai.server.time_per_output_token`.
    """
    num_each = record.num_completion_tokens / max(1, record.options.num_outputs)
    if num_each <= 1:
        return math.nan
    return (record.end_s - record.arrival_s - record.ttft_s) / (num_each - 1)


def _phase_seconds(record: RequestRecord) -> dict[SegmentKind, float]:
    """Return the total time in each phase, in seconds. Phases that did not occur are absent."""
    seconds: dict[SegmentKind, float] = {}
    for segment in record.segments:
        spent = segment.end_s - segment.start_s
        seconds[segment.kind] = seconds.get(segment.kind, 0.0) + spent
    return seconds
