"""The thread that writes queued traces, the limit of spans that wait for export, the clock of
spans, the settings of the export, and log lines about traces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.export import (
    OncePerMinute,
    TraceWorker,
    make_exporters,
    start_tracing,
)
from penstock.server.observe.spans.span_processor import (
    NAMES,
    CountingExporter,
    QueueSlots,
    SpanCounts,
)
from penstock.server.observe.spans.span_writer import UnixClock, to_unix_ns
from penstock.server.observe.spans.variables import (
    check_numbers,
    max_batch_spans,
    max_queue_spans,
    unset_blank_numbers,
)
from support.reports import request_record
from support.timeout import TEST_TIMEOUT_S


class Stage:
    """A trace writer that blocks until `is_open` is set, and records the request ids that it
    writes.
    """

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.has_begun = threading.Event()
        self.written: list[str] = []

    def write(self, record: RequestRecord) -> bool:
        """Record the request id. Return True, which means that the trace is kept, if `sequence` is
        odd. Raises ValueError if it is 13.
        """
        self.has_begun.set()
        assert self.is_open.wait(TEST_TIMEOUT_S)
        if record.sequence == 13:
            raise ValueError(f"{record.request_id}: secret text")
        self.written.append(record.request_id)
        return record.sequence % 2 == 1


def records(first: int, last: int) -> list[RequestRecord]:
    return [request_record(number) for number in range(first, last + 1)]


def test_records_are_written_in_order_and_counted() -> None:
    stage, tally = Stage(), SpanCounts()
    worker = TraceWorker(stage.write, tally)
    stage.is_open.set()
    worker.start()
    worker.put(records(1, 3))
    worker.put([])
    worker.put(records(4, 5))
    assert worker.finish(TEST_TIMEOUT_S)
    assert stage.written == [f"request-{number}" for number in range(1, 6)]
    assert tally.counts() == dict.fromkeys(NAMES, 0) | {"traces_kept": 3, "traces_sampled_out": 2}


def test_records_beyond_the_queue_size_are_dropped_and_counted() -> None:
    stage, tally = Stage(), SpanCounts()
    worker = TraceWorker(stage.write, tally, max_queued=4)
    worker.start()
    worker.put(records(1, 1))
    assert stage.has_begun.wait(TEST_TIMEOUT_S)
    worker.put(records(2, 8))
    worker.put(records(9, 10))
    assert tally.counts()["traces_dropped_queue_full"] == 5
    stage.is_open.set()
    assert worker.finish(TEST_TIMEOUT_S)
    assert stage.written == [f"request-{number}" for number in range(1, 6)]


def test_a_record_that_cannot_be_written_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage, tally = Stage(), SpanCounts()
    stage.is_open.set()
    worker = TraceWorker(stage.write, tally)
    with caplog.at_level(logging.ERROR):
        worker.start()
        worker.put([*records(13, 13), *records(13, 15)])
        assert worker.finish(TEST_TIMEOUT_S)
    assert stage.written == ["request-14", "request-15"]
    assert tally.counts()["traces_dropped_unwritable"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "a trace could not be written: ValueError"
    ]
    assert "secret" not in caplog.text


def test_a_hanging_trace_worker_is_abandoned() -> None:
    stage, tally = Stage(), SpanCounts()
    worker = TraceWorker(stage.write, tally)
    worker.start()
    worker.put(records(1, 9))
    assert stage.has_begun.wait(TEST_TIMEOUT_S)
    assert not worker.finish(0.01)
    worker.give_up()
    worker.put(records(10, 11))
    assert tally.counts()["traces_dropped_closing"] == 8 + 2
    stage.is_open.set()
    assert worker.finish(TEST_TIMEOUT_S)
    assert stage.written == ["request-1"]


def test_queue_slots_admit_no_more_than_their_number() -> None:
    slots = QueueSlots(2)
    assert slots.acquire()
    assert slots.acquire()
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(slots.acquire()))
    waiting.start()
    assert slots.start_export(1)
    waiting.join(TEST_TIMEOUT_S)
    assert answers == [True]
    late = threading.Thread(target=lambda: answers.append(slots.acquire()))
    late.start()
    slots.close()
    late.join(TEST_TIMEOUT_S)
    assert answers == [True, False]
    assert slots.start_export(1)
    assert slots.end_export(1)
    assert slots.abandon() == 2
    assert not slots.start_export(1)
    assert not slots.end_export(1)


class IntermittentExporter(SpanExporter):
    """An exporter whose first call succeeds, whose second call returns a failure, and whose third
    call raises OSError.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_shutdowns = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_calls += 1
        if self.num_calls == 3:
            raise OSError("gone")
        return SpanExportResult.SUCCESS if self.num_calls == 1 else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def test_exports_are_counted_by_how_they_went() -> None:
    fickle, tally = IntermittentExporter(), SpanCounts()
    exporter = CountingExporter(fickle, QueueSlots(100), tally)
    spans = [ReadableSpan("span")] * 5
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert exporter.export(spans[:3]) is SpanExportResult.FAILURE
    with pytest.raises(OSError, match="gone"):
        exporter.export(spans[:2])
    counts = tally.counts()
    assert (counts["spans_exported"], counts["spans_dropped_export"]) == (5, 5)
    exporter.shutdown()
    exporter.shutdown()
    assert fickle.num_shutdowns == 1


def test_unix_time_follows_corrections_but_not_within_a_second() -> None:
    now = {"monotonic": 5_000_000_000, "unix": 1_700_000_005_000_000_000}
    clock = UnixClock(lambda: now["monotonic"], lambda: now["unix"])
    assert to_unix_ns(5.25, clock.offset_ns()) == 1_700_000_005_250_000_000
    now["unix"] += 3_000_000_000
    assert to_unix_ns(5.0, clock.offset_ns()) == 1_700_000_005_000_000_000
    now["monotonic"] += 1_500_000_000
    assert to_unix_ns(6.5, clock.offset_ns()) == 1_700_000_008_000_000_000


def test_of_several_readings_the_least_interrupted_counts() -> None:
    monotonic = iter([0, 0, 900, 1000, 1010, 2000, 2400])
    unix = iter([50_000, 50_505, 52_900])
    assert UnixClock(lambda: next(monotonic), lambda: next(unix)).offset_ns() == 50_505 - 1005


def test_a_message_is_logged_once_a_minute() -> None:
    quiet = OncePerMinute()

    def passes(message: str, created: float, *args: object) -> bool:
        record = logging.LogRecord("name", logging.ERROR, __file__, 1, message, args, None)
        record.created = created
        return quiet.filter(record)

    assert passes("failed to reach %s", 0.0, "a")
    assert not passes("failed to reach %s", 59.0, "b")
    assert passes("another", 59.0)
    assert passes("failed to reach %s", 60.5, "b")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "nonsense"}, "OTEL_TRACES_EXPORTER: no exporter 'nonsense'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL must be"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "x"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must"),
    ],
)
def test_a_bad_choice_of_exporter_names_its_variable(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_exporters(environment)


def test_the_exporter_none_disables_export() -> None:
    assert make_exporters({"OTEL_TRACES_EXPORTER": "none"}) == ()


def test_the_queue_has_the_length_of_the_variable() -> None:
    assert max_queue_spans({}) == 2048
    assert max_queue_spans({"OTEL_BSP_MAX_QUEUE_SIZE": "600"}) == 600
    for bad in ("0", "-1", "many", "1.5"):
        with pytest.raises(ValueError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
            max_queue_spans({"OTEL_BSP_MAX_QUEUE_SIZE": bad})


def test_a_batch_is_never_larger_than_the_queue() -> None:
    assert max_batch_spans({}) == 512
    assert max_batch_spans({"OTEL_BSP_MAX_QUEUE_SIZE": "256"}) == 256
    assert max_batch_spans({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1000"}) == 1000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "nan"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "1.5"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1"),
    ],
)
def test_an_invalid_number_is_reported_with_its_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        check_numbers({name: text})


def test_a_blank_number_counts_as_unset() -> None:
    environment = {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": " ", "OTEL_BSP_SCHEDULE_DELAY": "5"}
    check_numbers(environment)
    unset_blank_numbers(environment)
    assert environment == {"OTEL_BSP_SCHEDULE_DELAY": "5"}


def test_counts_of_traces_are_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tracing = start_tracing(
        TracingConfig(is_on=True), model="tiny", environment={"OTEL_TRACES_EXPORTER": "none"}
    )
    tracing.add_records(records(1, 3))
    with caplog.at_level(logging.INFO, "penstock.server.observe.spans.export"):
        tracing.close(TEST_TIMEOUT_S)
    assert caplog.messages == ["traces and spans, from start to end: traces_kept 3"]
