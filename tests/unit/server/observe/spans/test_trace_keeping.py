"""Which traces are kept by rule, by the caller's decision, or by the environment's sampler."""

from __future__ import annotations

import logging
import math
from typing import Any, cast

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.keys import SAMPLING_REASON
from penstock.server.observe.spans.sampler import (
    KeepReason,
    KeepSampler,
    reason_to_keep,
    sampler_from,
)
from support.reports import preempted_record, rejected_record, request_record

CONFIG = TracingConfig(is_on=True, slow_ttft_s=1.0, slow_s=10.0)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (request_record(), None),
        (request_record(ttft_s=1.01), KeepReason.SLOW),
        (request_record(end_s=110.01, ttft_s=0.1), KeepReason.SLOW),
        (request_record(ttft_s=math.nan), KeepReason.SLOW),
        (request_record(ttft_s=math.nan, end_s=100.5), None),
        (preempted_record(), KeepReason.PREEMPTED),
        (request_record(num_replays=1), KeepReason.REPLAYED),
        (rejected_record(13, "INTERNAL"), KeepReason.ERROR),
        (rejected_record(4, "DEADLINE_EXCEEDED"), KeepReason.ERROR),
        (rejected_record(8, "QUEUE_FULL"), None),
        (rejected_record(1, ""), None),
    ],
)
def test_errors_slow_and_disturbed_requests_are_kept(
    record: RequestRecord, reason: KeepReason | None
) -> None:
    assert reason_to_keep(record, CONFIG) is reason


def test_no_request_is_slow_without_a_limit() -> None:
    assert reason_to_keep(request_record(end_s=9_000.0, ttft_s=math.nan), TracingConfig()) is None


def context(*, is_remote: bool, is_sampled: bool) -> Context:
    """Return a context with a parent span of trace 7."""
    parent = SpanContext(
        7,
        9,
        is_remote=is_remote,
        trace_flags=TraceFlags(int(is_sampled)),
        trace_state=TraceState([("vendor", "x")]),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def decide(sampler: KeepSampler, parent: Context, attributes: Any) -> tuple[Decision, object]:
    """Return the decision on a span of trace 7, and the reason that it records."""
    result: Any = sampler.should_sample(parent, 7, "name", attributes=attributes)
    return result.decision, result.attributes.get(SAMPLING_REASON)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_reason_to_keep_overrides_parent_and_sampler(is_sampled: bool) -> None:
    parent = context(is_remote=True, is_sampled=is_sampled)
    reported = {SAMPLING_REASON: "error"}
    for inner in (ALWAYS_OFF, DEFAULT_ON):
        result = KeepSampler(inner).should_sample(parent, 7, "name", attributes=reported)
        assert result.decision is Decision.RECORD_AND_SAMPLE
        assert result.trace_state == TraceState([("vendor", "x")])


def test_the_callers_decision_is_honoured() -> None:
    sampler = KeepSampler(DEFAULT_ON)
    yes, no = (context(is_remote=True, is_sampled=is_sampled) for is_sampled in (True, False))
    assert decide(sampler, yes, {}) == (Decision.RECORD_AND_SAMPLE, "parent")
    assert decide(sampler, no, {})[0] is Decision.DROP
    assert decide(sampler, Context(), {}) == (Decision.RECORD_AND_SAMPLE, "sampler")


def test_children_follow_their_root_whatever_the_sampler() -> None:
    sampler = KeepSampler(ALWAYS_OFF)
    yes, no = (context(is_remote=False, is_sampled=is_sampled) for is_sampled in (True, False))
    assert decide(sampler, yes, {}) == (Decision.RECORD_AND_SAMPLE, None)
    assert decide(sampler, no, {})[0] is Decision.DROP


@pytest.mark.parametrize(
    ("environment", "description"),
    [
        ({}, cast(Any, DEFAULT_ON).get_description()),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, "AlwaysOffSampler"),
        ({"OTEL_TRACES_SAMPLER": " Always_On "}, "AlwaysOnSampler"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            "TraceIdRatioBased{0.25}",
        ),
    ],
)
def test_the_environment_chooses_the_sampler(environment: dict[str, str], description: str) -> None:
    sampler: Any = sampler_from(environment)
    assert sampler.get_description() == description


@pytest.mark.parametrize(
    ("name", "argument", "rate"),
    [("nonsense", None, None), ("traceidratio", "2", 1.0), ("traceidratio", None, 1.0)],
)
def test_a_bad_sampler_is_a_warning_and_keeps_all(
    name: str, argument: str | None, rate: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"OTEL_TRACES_SAMPLER": name}
    if argument is not None:
        environment["OTEL_TRACES_SAMPLER_ARG"] = argument
    with caplog.at_level(logging.WARNING):
        sampler: Any = sampler_from(environment)
    assert len(caplog.records) == 1
    assert "OTEL_TRACES_SAMPLER" in caplog.text
    assert sampler is DEFAULT_ON if rate is None else sampler.rate == rate
