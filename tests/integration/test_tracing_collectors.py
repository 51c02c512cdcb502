"""Trace collectors that are dead, hang or reject: their spans are dropped and counted. A slow or
restarted collector gets the spans.
"""

from __future__ import annotations

import pytest

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.spans import export
from penstock.server.observe.spans.export import MAX_QUEUED_RECORDS, start_tracing
from support.otlp_receiver import Mode, Receiver, dead_endpoint, grpc_receiver, http_receiver
from support.reports import request_record
from support.timeout import TEST_TIMEOUT_S
from support.traced_process import Outcome, run_traced

SPANS_PER_REQUEST = 6
CLOSE_LIMIT_S = 1.0
SDK_HANG_S = 25.0
"""By default the SDK takes 30 seconds to shut down when its collector does not answer."""


def check_all_accounted_for(outcome: Outcome, num_requests: int) -> None:
    """Check that no span was exported, that each is counted once, and that closing did not wait for
    the SDK's timeout.
    """
    counts = outcome.counters
    num_traces = sum(number for name, number in counts.items() if name.startswith("traces_"))
    assert num_traces == num_requests
    assert counts["spans_exported"] == 0
    lost = counts["spans_dropped_export"] + counts["spans_dropped_closing"]
    assert lost == counts["traces_kept"] * SPANS_PER_REQUEST
    assert outcome.end_s < SDK_HANG_S


@pytest.mark.parametrize("num_requests", [5, 600])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_collector(protocol: str, num_requests: int) -> None:
    with dead_endpoint() as endpoint:
        outcome = run_traced(
            {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol},
            num_requests=num_requests,
            close_limit_s=CLOSE_LIMIT_S,
        )
    check_all_accounted_for(outcome, num_requests)


@pytest.mark.parametrize("mode", [Mode.HANGING, Mode.REJECTING, Mode.EXHAUSTED])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_rejects_everything(protocol: str, mode: Mode) -> None:
    opened = grpc_receiver(mode) if protocol == "grpc" else http_receiver(mode)
    with opened as receiver:
        outcome = run_traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            },
            num_requests=600,
            close_limit_s=CLOSE_LIMIT_S,
            before_close=receiver.wait_for_call,
        )
    check_all_accounted_for(outcome, 600)


def test_a_long_exporter_timeout_does_not_extend_closing() -> None:
    with grpc_receiver(Mode.HANGING) as receiver:
        outcome = run_traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
            },
            num_requests=5,
            close_limit_s=CLOSE_LIMIT_S,
        )
    check_all_accounted_for(outcome, 5)


def test_a_collector_that_hangs_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_receiver(Mode.HANGING) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
        # On a busy machine the record that is being written takes longer than usual.
        monkeypatch.setattr(export, "_LAST_TRACE_S", TEST_TIMEOUT_S)
        tracing = start_tracing(TracingConfig(is_on=True), model="tiny")
        tracing.add_records([request_record(number) for number in range(1, 1001)])
        receiver.wait_for_call()
        record = request_record()
        num_more = 3 * MAX_QUEUED_RECORDS
        for _ in range(3):
            tracing.add_records([record] * MAX_QUEUED_RECORDS)
        counts = tracing.counters()
        dropped = counts["traces_dropped_queue_full"]
        # One batch is with the exporter; the SDK's queue and ours are full.
        most_kept = 1 + (512 + 2048) // SPANS_PER_REQUEST
        assert dropped >= 1000 + num_more - MAX_QUEUED_RECORDS - most_kept
        assert counts["traces_kept"] <= most_kept
        tracing.close(CLOSE_LIMIT_S)
        counts = tracing.counters()
        lost = counts["spans_dropped_export"] + counts["spans_dropped_closing"]
        assert (counts["spans_exported"], lost > 0) == (0, True)
        assert 0 < counts["traces_dropped_closing"] <= MAX_QUEUED_RECORDS
        num_traces = sum(number for name, number in counts.items() if name.startswith("traces_"))
        assert num_traces == 1000 + num_more


def take_and_close(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    # On a busy machine an export may take longer than the usual timeout, which would drop it.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    tracing = start_tracing(TracingConfig(is_on=True), model="tiny")
    tracing.add_records([request_record(number) for number in range(1, 401)])
    tracing.close(TEST_TIMEOUT_S)
    return tracing.counters()


def test_a_slow_collector_receives_all_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_receiver(Mode.SLOW) as receiver:
        counts = take_and_close(receiver, monkeypatch)
        assert len(receiver.spans()) == counts["spans_exported"] == 400 * SPANS_PER_REQUEST


def test_a_restarted_collector_receives_later_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with grpc_receiver(Mode.EXHAUSTED) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing = start_tracing(TracingConfig(is_on=True), model="tiny")
        tracing.add_records([request_record(1)])
        receiver.wait_for_call()
        receiver.mode = Mode.OK
        tracing.add_records([request_record(2)])
        spans = receiver.wait_for_spans(SPANS_PER_REQUEST)
        tracing.close(TEST_TIMEOUT_S)
    assert request_record(2).trace.trace_id in {span.trace_id for span in receiver.spans()}
    assert len(spans) >= SPANS_PER_REQUEST
