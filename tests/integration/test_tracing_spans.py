"""Records become spans at a real collector, with correct ids, times, parents and sampling, and
without content by default.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.listeners import ServiceListener
from penstock.server.observe.request_record import Content, RequestRecord, TraceParent
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.export import start_tracing
from support.otlp_receiver import Receiver, attributes_of, grpc_receiver
from support.reports import (
    GENERATE,
    preempted_record,
    rejected_record,
    request_record,
    trace_parent,
)
from support.timeout import TEST_TIMEOUT_S

CLOSE_LIMIT_S = TEST_TIMEOUT_S
ON = TracingConfig(is_on=True)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Provide a collector to which this process exports."""
    # On a busy machine an export may take longer than the usual timeout, which would drop it.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with grpc_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        yield receiver


def traced(
    receiver: Receiver, records: Sequence[RequestRecord], config: TracingConfig = ON
) -> tuple[list[Span], dict[str, int]]:
    """Export the spans of the records; return all spans that the collector received, and the
    counters.
    """
    tracing = start_tracing(config, model="tiny")
    tracing.add_records(records)
    tracing.close(CLOSE_LIMIT_S)
    return receiver.spans(), tracing.counters()


def roots_of(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of kind SERVER, which are the roots."""
    return [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]


def test_one_request_is_one_tree_of_spans_without_gaps(receiver: Receiver) -> None:
    now_s = time.monotonic()
    record = request_record(arrival_s=now_s - 2.0)
    spans, counts = traced(receiver, [record])
    (root,) = roots_of(spans)
    children = sorted(
        (span for span in spans if span is not root), key=lambda s: s.start_time_unix_nano
    )
    assert root.name == GENERATE
    assert root.trace_id == record.trace.trace_id
    assert root.span_id == record.trace.span_id
    assert root.parent_span_id == b""
    assert [span.name for span in children] == ["prepare", "queue", "prefill", "decode", "deliver"]
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert {span.trace_id for span in children} == {root.trace_id}
    assert {span.kind for span in children} == {Span.SPAN_KIND_INTERNAL}
    edges = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in children]
    assert edges[0][0] == root.start_time_unix_nano
    assert edges[-1][1] == root.end_time_unix_nano
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert abs(root.end_time_unix_nano - time.time_ns()) < 600e9
    assert counts["traces_kept"] == 1
    assert counts["spans_exported"] == 6


def test_attributes_arrive_with_their_types_and_the_schema(receiver: Receiver) -> None:
    spans, _ = traced(receiver, [request_record(num_stalls=1, stalled_s=0.25)])
    attributes = attributes_of(roots_of(spans)[0].attributes)
    assert attributes[keys.RPC_SYSTEM] == "grpc"
    assert attributes[keys.RESPONSE_FINISH_REASONS] == ("stop",)
    assert attributes[keys.USAGE_OUTPUT] == 17
    assert attributes[keys.REQUEST_STREAM] is True
    assert attributes[keys.STALLED] == 0.25
    assert attributes[keys.SAMPLING_REASON] == "sampler"
    scope = receiver.requests[0].resource_spans[0].scope_spans[0]
    assert scope.schema_url == keys.SCHEMA_URL
    assert scope.scope.name == "penstock"


def child_of(number: int, *, is_sampled: bool, **changes: Any) -> RequestRecord:
    """Return the record of a request whose caller has a trace with this sampling decision."""
    trace = trace_parent(
        number,
        parent_span_id=b"\x00callers",
        is_parent_sampled=is_sampled,
        trace_state="vendor=opaque, other@x=1",
    )
    return request_record(number, trace=trace, **changes)


def test_the_callers_span_is_the_parent(receiver: Receiver) -> None:
    spans, _ = traced(receiver, [child_of(1, is_sampled=True)])
    (root,) = roots_of(spans)
    assert root.parent_span_id == b"\x00callers"
    assert root.trace_state == "vendor=opaque,other@x=1"
    assert attributes_of(root.attributes)[keys.SAMPLING_REASON] == "parent"


@pytest.mark.parametrize("state", ["no equals sign CANARY", "a=1,a=2", "A=1", "a=1,b==", "a=é"])
def test_a_malformed_trace_state_is_left_out_and_not_logged(
    receiver: Receiver, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    trace = msgspec.structs.replace(child_of(1, is_sampled=True).trace, trace_state=state)
    spans, _ = traced(receiver, [request_record(trace=trace)])
    assert {span.trace_state for span in spans} == {""}
    assert "CANARY" not in caplog.text


def test_a_sampling_ratio_keeps_its_share_and_all_errors(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.2")
    dice = random.Random(7)
    records: list[RequestRecord] = []
    for number in range(1, 401):
        trace = trace_parent(number, trace_id=dice.randbytes(16))
        is_error = number % 8 == 0
        records.append(rejected_record(13 if is_error else 3, "INTERNAL", trace=trace))
    spans, counts = traced(receiver, records)
    kept = {root.trace_id for root in roots_of(spans)}
    errors = {record.trace.trace_id for record in records if record.code == 13}
    lucky = {
        record.trace.trace_id
        for record in records
        if int.from_bytes(record.trace.trace_id[8:], "big") < round(0.2 * 2**64)
    }
    assert kept == errors | lucky
    assert counts["traces_sampled_out"] == 400 - len(kept) > 200


def content_records() -> list[RequestRecord]:
    """Return records with prompts and outputs that must not leak, and with such text in place of
    names.
    """
    content = Content(prompt="CANARY-prompt", outputs=("CANARY-output", "CANARY-second"))
    return [
        request_record(1, content=content, reason="CANARY text", finish_reasons=("CANARY said",)),
        preempted_record(content=content, trace=trace_parent(2)),
        rejected_record(13, "CANARY: prompt was ...", content=content, trace=trace_parent(3)),
        request_record(4, trace=trace_parent(4, trace_state="CANARY IS NO STATE")),
    ]


def test_by_default_spans_contain_no_content(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    spans, _ = traced(receiver, content_records())
    assert len(roots_of(spans)) == 4
    assert all(b"CANARY" not in payload for payload in receiver.payloads)
    assert "CANARY" not in caplog.text


def test_the_sdk_limit_on_attributes_is_respected(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    spans, _ = traced(receiver, [request_record(tenant="a-long-name")])
    assert attributes_of(roots_of(spans)[0].attributes)[keys.TENANT] == "a-lo"


def test_thousands_of_requests_are_thousands_of_traces(receiver: Receiver) -> None:
    tracing = start_tracing(ON, model="tiny")
    consumer: ServiceListener = tracing
    num = 3000
    for first in range(1, num, 500):
        consumer.add_records([request_record(number) for number in range(first, first + 500)])
    assert receiver.wait_until(lambda: len(receiver.spans()) >= 6 * num)
    tracing.close(CLOSE_LIMIT_S)
    counts = tracing.counters()
    roots = [root.trace_id for root in roots_of(receiver.spans())]
    assert len(roots) == len(set(roots)) == num
    assert counts["spans_exported"] == 6 * num
    assert not any(number for name, number in counts.items() if "dropped" in name)


def test_a_request_without_a_trace_has_no_spans(receiver: Receiver) -> None:
    records = [request_record(trace=TraceParent(b"", b"")), request_record(2)]
    spans, counts = traced(receiver, records)
    assert [root.trace_id for root in roots_of(spans)] == [records[1].trace.trace_id]
    assert (counts["traces_kept"], counts["traces_sampled_out"]) == (1, 1)
