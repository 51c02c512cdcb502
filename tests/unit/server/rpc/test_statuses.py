"""Refusals to gRPC statuses."""

from __future__ import annotations

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

from penstock.scheduler.request import FailureReason
from penstock.server.front.errors import ErrorReason, FieldViolation, Refusal
from penstock.server.front.failures import refusal_for
from penstock.server.front.phases import PhaseClock
from penstock.server.rpc.statuses import STATUS_RULES, abort_of, status_of
from penstock.v1 import error_pb2

# As the contract's comments say (error.proto).
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
    "EXECUTOR_REFUSED": grpc.StatusCode.INVALID_ARGUMENT,
}
RETRYABLE = {"QUEUE_FULL", "QUOTA_EXCEEDED", "DRAINING", "ENGINE_DOWN"}


def details(status: Status) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for detail in status.details:
        for kind in (BadRequest, ErrorInfo, QuotaFailure, RequestInfo, RetryInfo):
            message = kind()
            if detail.TypeName() == f"google.rpc.{kind.__name__}":
                detail.Unpack(message)
                found[kind.__name__] = message
    return found


def test_reasons_are_those_of_the_contract() -> None:
    prefix = "ERROR_REASON_"
    names = {value.name.removeprefix(prefix) for value in error_pb2.ErrorReason.DESCRIPTOR.values}
    assert names - {"UNSPECIFIED"} == {reason.value for reason in ErrorReason}
    assert set(STATUS_RULES) == set(ErrorReason)


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_code_and_details_of_every_reason(reason: ErrorReason) -> None:
    abort = abort_of(Refusal(reason=reason), request_id="r-1", retry_after_s=1.5)
    assert abort.code is CODES[reason.value]
    trailers = dict(abort.trailers)
    data = trailers["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    status = Status.FromString(data)
    assert status.code == abort.code.value[0]
    assert status.message == abort.message != ""
    found = details(status)
    info = found["ErrorInfo"]
    assert isinstance(info, ErrorInfo)
    assert (info.reason, info.domain) == (reason.value, "penstock.v1")
    request = found["RequestInfo"]
    assert isinstance(request, RequestInfo)
    assert request.request_id == "r-1"
    assert ("RetryInfo" in found) is (reason.value in RETRYABLE)
    assert ("grpc-retry-pushback-ms" in trailers) is (reason.value in RETRYABLE)
    if reason.value in RETRYABLE:
        retry = found["RetryInfo"]
        assert isinstance(retry, RetryInfo)
        assert retry.retry_delay.ToMilliseconds() == 1500
        assert trailers["grpc-retry-pushback-ms"] == "1500"
    assert ("QuotaFailure" in found) is (reason is ErrorReason.QUOTA_EXCEEDED)


def test_no_request_id_no_request_info() -> None:
    assert "RequestInfo" not in details(status_of(Refusal(reason=ErrorReason.INTERNAL)))


def test_violations_are_told_and_bounded() -> None:
    many = tuple(
        FieldViolation(path=f"token_ids.ids[{i}]" + "x" * 999, description="é" * 999)
        for i in range(100)
    )
    abort = abort_of(Refusal(reason=ErrorReason.INVALID_ARGUMENT, violations=many))
    assert len(abort.message.encode()) <= 1024
    data = dict(abort.trailers)["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    status = Status.FromString(data)
    found = details(status)
    bad = found["BadRequest"]
    info = found["ErrorInfo"]
    assert isinstance(bad, BadRequest)
    assert isinstance(info, ErrorInfo)
    assert len(bad.field_violations) == 16
    assert info.metadata["num_more_violations"] == "84"
    assert status.ByteSize() < 16_000


@pytest.mark.parametrize("reason", list(FailureReason))
def test_every_failure_of_the_engine_has_a_status(reason: FailureReason) -> None:
    refusal = refusal_for(
        reason, phases=PhaseClock(0.0), prompt_path="text.text", deadline_kind="total"
    )
    assert refusal.reason in STATUS_RULES
    if "DEADLINE" in reason.name:
        assert set(refusal.metadata) == {"state", "phase", "deadline"}
