"""Converts the failures of calls to gRPC statuses.

Contains the table of codes and standard messages by error reason, and adds the google.rpc error
details. No message quotes a prompt, an output or an exception.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status

from penstock.conventions import ERROR_DOMAIN, PUSHBACK_KEY, STATUS_DETAILS_KEY
from penstock.server.front.errors import ErrorReason, Failure, QuotaViolation

MAX_MESSAGE_BYTES: Final = 1024
MAX_VIOLATIONS: Final = 16
"""Maximum number of violations in one status. Details are sent in metadata, whose size peers
limit."""
MAX_DETAIL_CHARS: Final = 256
MAX_RETRY_SPREAD: Final = 0.25
"""Maximum share of the retry delay that is added at random."""
_MAX_PUSHBACK_MS: Final = 2**31 - 1

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRule:
    """The gRPC code and the standard message of one error reason.

    If `is_retryable`, a failure without a retry delay gets the default delay, so that its status
    has RetryInfo and the retry push-back trailer.
    """

    code: grpc.StatusCode
    message: str
    is_retryable: bool = False


_C = grpc.StatusCode

STATUS_RULES: Final[Mapping[ErrorReason, StatusRule]] = {
    ErrorReason.INVALID_ARGUMENT: StatusRule(
        code=_C.INVALID_ARGUMENT, message="the request is not valid"
    ),
    ErrorReason.PROMPT_TOO_LONG: StatusRule(
        code=_C.INVALID_ARGUMENT, message="the request exceeds the model's context"
    ),
    ErrorReason.EXCEEDS_KV_CACHE: StatusRule(
        code=_C.INVALID_ARGUMENT,
        message="the request would not fit into the KV cache even if it were alone",
    ),
    ErrorReason.MALFORMED_REQUEST: StatusRule(
        code=_C.INVALID_ARGUMENT, message="the bytes cannot be parsed as the expected message"
    ),
    ErrorReason.MODEL_NOT_FOUND: StatusRule(
        code=_C.NOT_FOUND, message="no model with this name is loaded"
    ),
    ErrorReason.ADAPTER_NOT_FOUND: StatusRule(
        code=_C.NOT_FOUND, message="the model has no such adapter"
    ),
    ErrorReason.REQUEST_NOT_FOUND: StatusRule(
        code=_C.NOT_FOUND, message="no live request has this id"
    ),
    ErrorReason.REQUEST_ID_IN_USE: StatusRule(
        code=_C.ALREADY_EXISTS, message="a request with this id is in flight"
    ),
    ErrorReason.QUEUE_FULL: StatusRule(
        code=_C.RESOURCE_EXHAUSTED, message="the queue is full", is_retryable=True
    ),
    ErrorReason.QUOTA_EXCEEDED: StatusRule(
        code=_C.RESOURCE_EXHAUSTED,
        message="a quota of the tenant is exceeded",
        is_retryable=True,
    ),
    # Not retryable, because the request was ended by its reader and not by load.
    ErrorReason.READER_STALLED: StatusRule(
        code=_C.RESOURCE_EXHAUSTED, message="the stream was not read for too long and was closed"
    ),
    ErrorReason.DEADLINE_UNREACHABLE: StatusRule(
        code=_C.DEADLINE_EXCEEDED, message="the deadline cannot be met", is_retryable=True
    ),
    ErrorReason.DEADLINE_EXCEEDED: StatusRule(
        code=_C.DEADLINE_EXCEEDED, message="a deadline passed"
    ),
    ErrorReason.DRAINING: StatusRule(
        code=_C.UNAVAILABLE, message="the server is about to stop", is_retryable=True
    ),
    ErrorReason.ENGINE_DOWN: StatusRule(
        code=_C.UNAVAILABLE, message="the engine is not available", is_retryable=True
    ),
    ErrorReason.FEATURE_UNSUPPORTED: StatusRule(
        code=_C.UNIMPLEMENTED, message="not supported by this service"
    ),
    ErrorReason.EXECUTOR_REQUEST_FAILED: StatusRule(
        code=_C.INTERNAL, message="the executor failed on this request"
    ),
    ErrorReason.INTERNAL: StatusRule(code=_C.INTERNAL, message="internal error"),
    ErrorReason.UNAUTHENTICATED: StatusRule(code=_C.UNAUTHENTICATED, message="invalid credentials"),
    ErrorReason.PERMISSION_DENIED: StatusRule(
        code=_C.PERMISSION_DENIED, message="the credentials do not allow this"
    ),
    ErrorReason.SEQUENCE_UNAVAILABLE: StatusRule(
        code=_C.OUT_OF_RANGE, message="these messages are no longer kept, or were never sent"
    ),
    ErrorReason.MODEL_NOT_READY: StatusRule(
        code=_C.FAILED_PRECONDITION, message="the model is not ready"
    ),
    ErrorReason.MODEL_EXISTS: StatusRule(
        code=_C.ALREADY_EXISTS, message="a model with this name is already loaded"
    ),
    ErrorReason.STREAM_SUPERSEDED: StatusRule(
        code=_C.ABORTED, message="another stream resumed the request"
    ),
    ErrorReason.EXECUTOR_REJECTED: StatusRule(
        code=_C.INVALID_ARGUMENT, message="the executor does not support this request"
    ),
    ErrorReason.NOT_POSSIBLE_NOW: StatusRule(
        code=_C.FAILED_PRECONDITION, message="not available now"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The arguments of `context.abort`."""

    code: grpc.StatusCode
    message: str
    trailers: Trailers


def retry_delay_s(failure: Failure, *, default_s: float, chance: float) -> float | None:
    """Return how long the caller should wait before it retries, in seconds; None if it should not
    retry.

    This is the delay of the failure. If the failure has none, it is `default_s` for a retryable
    reason, and None for others. An infinite delay also means None. The share MAX_RETRY_SPREAD *
    `chance` of the delay is added, so that callers that were rejected together do not retry
    together. `chance` is a uniform random number in [0, 1).
    """
    delay_s = failure.retry_after_s
    if delay_s is None:
        if not STATUS_RULES[failure.reason].is_retryable:
            return None
        delay_s = default_s
    if math.isinf(delay_s):
        return None
    return delay_s * (1.0 + MAX_RETRY_SPREAD * chance)


def status_of(
    failure: Failure, *, request_id: str = "", retry_after_s: float | None = None
) -> Status:
    """Return the google.rpc.Status of a failure. Its message is at most 1 KiB long.

    `retry_after_s` is added as RetryInfo unless it is None, and `request_id` as RequestInfo unless
    it is empty.
    """
    rule = STATUS_RULES[failure.reason]
    status = Status(code=rule.code.value[0], message=_message(failure, rule))
    metadata = {key: value[:MAX_DETAIL_CHARS] for key, value in failure.metadata.items()}
    num_omitted = len(failure.violations) - MAX_VIOLATIONS
    if num_omitted > 0:
        metadata["num_more_violations"] = str(num_omitted)
    _add(status, ErrorInfo(reason=failure.reason.value, domain=ERROR_DOMAIN, metadata=metadata))
    if failure.violations:
        bad_request = BadRequest()
        for violation in failure.violations[:MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=violation.path[:MAX_DETAIL_CHARS],
                description=violation.description[:MAX_DETAIL_CHARS],
            )
        _add(status, bad_request)
    if failure.reason is ErrorReason.QUOTA_EXCEEDED:
        broken = failure.quota or QuotaViolation(subject="tenant", description=rule.message)
        quota = QuotaFailure()
        quota.violations.add(
            subject=broken.subject[:MAX_DETAIL_CHARS],
            description=broken.description[:MAX_DETAIL_CHARS],
        )
        _add(status, quota)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(_milliseconds(retry_after_s))
        _add(status, RetryInfo(retry_delay=delay))
    if request_id:
        _add(status, RequestInfo(request_id=request_id[:MAX_DETAIL_CHARS]))
    return status


def abort_of(
    failure: Failure, *, request_id: str = "", retry_after_s: float | None = None
) -> Abort:
    """Return the status of a failure (see `status_of`) as arguments of `context.abort`. If
    `retry_after_s` is not None, the trailing metadata also has the retry push-back."""
    rule = STATUS_RULES[failure.reason]
    status = status_of(failure, request_id=request_id, retry_after_s=retry_after_s)
    trailers: Trailers = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    if retry_after_s is not None:
        trailers = (*trailers, (PUSHBACK_KEY, str(_milliseconds(retry_after_s))))
    return Abort(code=rule.code, message=status.message, trailers=trailers)


def _milliseconds(duration_s: float) -> int:
    return min(max(1, round(duration_s * 1000)), _MAX_PUSHBACK_MS)


def _add(status: Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _message(failure: Failure, rule: StatusRule) -> str:
    message = failure.message or rule.message
    if failure.violations:
        first = failure.violations[0]
        # The standard message of INVALID_ARGUMENT would repeat the code.
        is_repeated = not failure.message and failure.reason is ErrorReason.INVALID_ARGUMENT
        start = "" if is_repeated else f"{message}: "
        message = f"{start}{first.path}: {first.description}"
        if len(failure.violations) > 1:
            message = f"{message} (and {len(failure.violations) - 1} more)"
    return message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
