"""Metrics from the records of ended requests.

Owns the reading of a record. It does not count requests, because records may be lost.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from penstock.server.observe.metrics import catalogue, labels
from penstock.server.observe.metrics.catalogue import MetricSpec
from penstock.server.observe.metrics.tables import MetricTables
from penstock.server.observe.request_record import RequestRecord, SegmentKind

_PHASES: Final[Mapping[SegmentKind, MetricSpec]] = {
    SegmentKind.PREPARE: catalogue.PREPARE_SECONDS,
    SegmentKind.QUEUE: catalogue.QUEUE_SECONDS,
    SegmentKind.PREFILL: catalogue.PREFILL_SECONDS,
    SegmentKind.DECODE: catalogue.DECODE_SECONDS,
    SegmentKind.DELIVER: catalogue.DELIVER_SECONDS,
}
_Values = defaultdict[tuple[MetricSpec, tuple[str, ...]], list[float]]


class RequestMetrics:
    """Adds records to the tables. `tenants`: those with separate series; the others share one."""

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

    def take(self, records: Sequence[RequestRecord]) -> None:
        """Add ended requests, with one update of each histogram for all of them."""
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
        # Requests that were never admitted were never looked up in the cache.
        if SegmentKind.PREFILL in phases or SegmentKind.DECODE in phases:
            counter(catalogue.PROMPT_TOKENS).add(record.num_prompt_tokens)
            counter(catalogue.PREFIX_QUERIES).add(record.num_prompt_tokens)
            counter(catalogue.PREFIX_HITS).add(record.num_cached_tokens)
        waited = counter(catalogue.QUEUE_WAIT)
        for segment in record.segments:
            if segment.is_engine_lost:
                waited.add(segment.end_s - segment.start_s, labels.ENGINE_LOST)
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
    """(duration - TTFT) / (n - 1), n tokens per output; NaN with fewer than two.

    As OpenTelemetry's `gen_ai.server.time_per_output_token`.
    """
    num_each = record.num_completion_tokens / max(1, record.options.num_outputs)
    if num_each <= 1:
        return math.nan
    return (record.end_s - record.arrival_s - record.ttft_s) / (num_each - 1)


def _phase_seconds(record: RequestRecord) -> dict[SegmentKind, float]:
    """Total time in each phase; phases that were not entered are absent."""
    seconds: dict[SegmentKind, float] = {}
    for segment in record.segments:
        spent = segment.end_s - segment.start_s
        seconds[segment.kind] = seconds.get(segment.kind, 0.0) + spent
    return seconds
