from __future__ import annotations

import math
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status

from penstock.scheduler.events import Failed
from penstock.scheduler.quotas import QuotaBreach, QuotaKind
from penstock.scheduler.request import Constraint, ConstraintKind, FailureReason
from penstock.server.front.errors import (
    ErrorReason,
    Failure,
    FieldViolation,
    failure_for,
    quota_exceeded,
)
from penstock.server.front.generation import GenerationSpec, TextInput
from penstock.server.front.phases import PhaseClock
from penstock.server.rpc.statuses import (
    MAX_RETRY_SPREAD,
    STATUS_RULES,
    Abort,
    abort_of,
    retry_delay_s,
    status_of,
)
from penstock.v1 import error_pb2

MessageT = TypeVar("MessageT", bound=Message)

# As in the contract's comments (error.proto).
CODES = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "EXCEEDS_KV_CACHE": grpc.StatusCode.INVALID_ARGUMENT,
    "MALFORMED_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "REQUEST_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "REQUEST_ID_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "READER_STALLED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE_UNREACHABLE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "ENGINE_DOWN": grpc.StatusCode.UNAVAILABLE,
    "FEATURE_UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    "EXECUTOR_REQUEST_FAILED": grpc.StatusCode.INTERNAL,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "SEQUENCE_UNAVAILABLE": grpc.StatusCode.OUT_OF_RANGE,
    "MODEL_NOT_READY": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "STREAM_SUPERSEDED": grpc.StatusCode.ABORTED,
    "EXECUTOR_REJECTED": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_POSSIBLE_NOW": grpc.StatusCode.FAILED_PRECONDITION,
}
RETRYABLE = {"QUEUE_FULL", "QUOTA_EXCEEDED", "DEADLINE_UNREACHABLE", "DRAINING", "ENGINE_DOWN"}


def detail(status: Status, kind: type[MessageT]) -> MessageT:
    tried = [(packed, kind()) for packed in status.details]
    (found,) = [message for packed, message in tried if packed.Unpack(message)]
    return found


def kinds_in(status: Status) -> set[str]:
    return {packed.TypeName().removeprefix("google.rpc.") for packed in status.details}


def status_in(abort: Abort) -> Status:
    data = dict(abort.trailers)["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    return Status.FromString(data)


def test_reasons_are_those_of_the_contract() -> None:
    prefix = "ERROR_REASON_"
    names = {value.name.removeprefix(prefix) for value in error_pb2.ErrorReason.DESCRIPTOR.values}
    assert names - {"UNSPECIFIED"} == {reason.value for reason in ErrorReason}
    assert set(STATUS_RULES) == set(ErrorReason)


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_code_and_details_of_every_reason(reason: ErrorReason) -> None:
    failure = Failure(reason=reason)
    delay_s = retry_delay_s(failure, default_s=1.5, chance=0.0)
    abort = abort_of(failure, request_id="r-1", retry_after_s=delay_s)
    assert abort.code is CODES[reason.value]
    trailers, status = dict(abort.trailers), status_in(abort)
    assert status.code == abort.code.value[0]
    assert status.message == abort.message != ""
    info, found = detail(status, ErrorInfo), kinds_in(status)
    assert (info.reason, info.domain) == (reason.value, "penstock.dev")
    assert detail(status, RequestInfo).request_id == "r-1"
    assert ("RetryInfo" in found) is (reason.value in RETRYABLE)
    assert ("grpc-retry-pushback-ms" in trailers) is (reason.value in RETRYABLE)
    if reason.value in RETRYABLE:
        assert detail(status, RetryInfo).retry_delay.ToMilliseconds() == 1500
        assert trailers["grpc-retry-pushback-ms"] == "1500"
    assert ("QuotaFailure" in found) is (reason is ErrorReason.QUOTA_EXCEEDED)


def test_no_request_id_no_request_info() -> None:
    assert "RequestInfo" not in kinds_in(status_of(Failure(reason=ErrorReason.INTERNAL)))


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (ErrorReason.INVALID_ARGUMENT, "sampling.top_p: must be positive (and 1 more)"),
        (
            ErrorReason.PROMPT_TOO_LONG,
            "the request exceeds the model's context: sampling.top_p: must be positive"
            " (and 1 more)",
        ),
    ],
)
def test_the_message_of_an_invalid_field_does_not_repeat_the_code(
    reason: ErrorReason, message: str
) -> None:
    violation = FieldViolation(path="sampling.top_p", description="must be positive")
    assert abort_of(Failure(reason=reason, violations=(violation,) * 2)).message == message


def test_violations_are_reported_and_bounded() -> None:
    many = tuple(
        FieldViolation(path=f"token_prompt.ids[{i}]" + "x" * 999, description="é" * 999)
        for i in range(100)
    )
    abort = abort_of(Failure(reason=ErrorReason.INVALID_ARGUMENT, violations=many))
    assert len(abort.message.encode()) <= 1024
    status = status_in(abort)
    bad, info = detail(status, BadRequest), detail(status, ErrorInfo)
    assert len(bad.field_violations) == 16
    assert info.metadata["num_more_violations"] == "84"
    assert status.ByteSize() < 16_000


@pytest.mark.parametrize("reason", list(FailureReason))
def test_every_failure_of_the_engine_has_a_status(reason: FailureReason) -> None:
    failure = rejected(Failed(key=1, at_s=0.0, reason=reason))
    assert failure.reason in STATUS_RULES
    assert failure.retry_after_s is None
    if "DEADLINE" in reason.name:
        assert set(failure.metadata) == {"state", "phase", "deadline"}
        assert failure.metadata["deadline"] == ("ttft" if "TTFT" in reason.name else "total")
        assert ("UNREACHABLE" in reason.name) is ("UNREACHABLE" in failure.reason.name)
    else:
        assert not failure.metadata


def rejected(end: Failed) -> Failure:
    return failure_for(
        end,
        GenerationSpec(
            prompt=TextInput(text="x"),
            prompt_path="text_prompt.text",
            constraint=Constraint(kind=ConstraintKind.REGEX, texts=("(",)),
        ),
        phases=PhaseClock(0.0),
        deadline_kind="total",
        tenant="acme",
    )


def test_a_constraint_that_the_executor_rejects_is_named_by_its_field() -> None:
    failure = rejected(Failed(key=1, at_s=0.0, reason=FailureReason.CONSTRAINT_REJECTED))
    abort = abort_of(failure)
    assert abort.code is grpc.StatusCode.INVALID_ARGUMENT
    bad = detail(status_of(failure), BadRequest)
    assert [each.field for each in bad.field_violations] == ["constraint.regex.pattern"]


def test_a_quota_error_names_the_tenant_and_the_limit() -> None:
    breach = QuotaBreach(kind=QuotaKind.REQUESTS_PER_MINUTE, limit=60, retry_after_s=0.5)
    failure = rejected(
        Failed(
            key=1,
            at_s=0.0,
            reason=FailureReason.TENANT_OVER_QUOTA,
            retry_after_s=breach.retry_after_s,
            breach=breach,
        )
    )
    status = status_of(failure)
    assert status.message == 'tenant "acme": at most 60 requests per minute'
    quota = detail(status, QuotaFailure)
    (violation,) = quota.violations
    assert violation.subject == "tenant:acme"
    assert violation.description == "max_requests_per_minute is 60"
    assert retry_delay_s(failure, default_s=9.0, chance=0.0) == 0.5


def test_a_quota_without_a_tenant_names_its_limit_in_words() -> None:
    error = quota_exceeded("", QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=4))
    assert status_of(error.failure).message == (
        "all requests without a tenant: at most 4 requests at a time"
    )


@pytest.mark.parametrize(
    ("breach", "limit"),
    [
        (QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=4), "max_num_live, which is 4"),
        (None, "the queue has places"),
    ],
)
def test_too_many_outputs_are_named_by_their_field_and_never_fit(
    breach: QuotaBreach | None, limit: str
) -> None:
    reason = FailureReason.TOO_MANY_OUTPUTS
    failure = rejected(
        Failed(key=1, at_s=0.0, reason=reason, retry_after_s=math.inf, breach=breach)
    )
    assert abort_of(failure).code is grpc.StatusCode.INVALID_ARGUMENT
    bad = detail(status_of(failure), BadRequest)
    (violation,) = bad.field_violations
    assert (violation.field, violation.description) == (
        "sampling.num_outputs",
        f"is more than {limit}",
    )
    assert retry_delay_s(failure, default_s=9.0, chance=0.0) is None


@pytest.mark.parametrize(
    ("reason", "deadline"),
    [
        (FailureReason.TTFT_DEADLINE_UNREACHABLE, "ttft"),
        (FailureReason.DEADLINE_UNREACHABLE, "total"),
        (FailureReason.TTFT_DEADLINE_EXCEEDED, "ttft"),
        (FailureReason.QUEUE_FULL, None),
        (FailureReason.TENANT_OVER_QUOTA, None),
    ],
)
def test_the_engines_details_of_a_rejection_are_returned(
    reason: FailureReason, deadline: str | None
) -> None:
    end = Failed(
        key=1, at_s=9.0, reason=reason, estimate_s=2.0001, deadline_s=1.9999, retry_after_s=3.0
    )
    failure = rejected(end)
    place = {} if deadline is None else {"state": "PENDING", "phase": "queue", "deadline": deadline}
    assert failure.metadata == {**place, "deadline_ms": "1999", "estimate_ms": "2001"}
    assert failure.retry_after_s == 3.0


@pytest.mark.parametrize(
    ("deadline_s", "estimate_s", "reported"),
    [
        (100_000.3 - 100_000.0 + 0.2, 0.5001, ("500", "501")),
        (0.49999999999, 0.49999999999999, ("500", "501")),
        (0.50000000001, 0.6, ("500", "600")),
        (0.4999, 0.4, ("499", "400")),
    ],
)
def test_a_deadline_is_returned_as_it_was_given_and_below_what_misses_it(
    deadline_s: float, estimate_s: float, reported: tuple[str, str]
) -> None:
    reason = FailureReason.DEADLINE_UNREACHABLE
    end = Failed(key=1, at_s=9.0, reason=reason, estimate_s=estimate_s, deadline_s=deadline_s)
    metadata = rejected(end).metadata
    assert (metadata["deadline_ms"], metadata["estimate_ms"]) == reported


def test_infinite_estimates_are_not_reported() -> None:
    end = Failed(
        key=1,
        at_s=0.0,
        reason=FailureReason.QUEUE_FULL,
        estimate_s=math.inf,
        deadline_s=math.inf,
        retry_after_s=math.inf,
    )
    assert rejected(end) == Failure(reason=ErrorReason.QUEUE_FULL, retry_after_s=math.inf)


def test_requests_rejected_together_have_different_retry_times() -> None:
    failure = Failure(reason=ErrorReason.DEADLINE_UNREACHABLE, retry_after_s=4.0)

    def reported_s(failure: Failure, chance: float) -> float | None:
        return retry_delay_s(failure, default_s=2.0, chance=chance)

    assert reported_s(failure, 0.0) == 4.0
    assert reported_s(failure, 0.5) == 4.0 * (1 + MAX_RETRY_SPREAD / 2)
    assert reported_s(failure, 0.999) == pytest.approx(5.0, rel=1e-3)
    assert reported_s(Failure(reason=ErrorReason.QUEUE_FULL), 0.5) == 2.25
    assert reported_s(Failure(reason=ErrorReason.DEADLINE_EXCEEDED), 0.5) is None
    late = Failure(reason=ErrorReason.DEADLINE_EXCEEDED, retry_after_s=8.0)
    assert reported_s(late, 0.0) == 8.0
    never = Failure(reason=ErrorReason.DEADLINE_UNREACHABLE, retry_after_s=math.inf)
    assert reported_s(never, 0.5) is None


@pytest.mark.parametrize(
    ("delay_s", "reported_ms"), [(0.0, "1"), (0.0126, "13"), (1e9, str(2**31 - 1))]
)
def test_a_retry_time_is_sent_in_milliseconds_within_32_bits(
    delay_s: float, reported_ms: str
) -> None:
    failure = Failure(reason=ErrorReason.QUEUE_FULL)
    assert (
        dict(abort_of(failure, retry_after_s=delay_s).trailers)["grpc-retry-pushback-ms"]
        == reported_ms
    )
