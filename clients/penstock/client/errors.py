"""What a call may raise, and the one table from status and reason to exception class.

Owns the exception tree. Does not know how a status travels: see `status.py`.

    PenstockError                  every failure of a call; catch this to catch them all
    +-- InvalidArgument            a field is missing or out of range; see `field_violations`
    |   +-- PromptTooLong          the prompt, with max_tokens, exceeds the model's context
    |   +-- ExceedsKVCache         would not fit the KV cache even alone
    |   +-- MalformedRequest       the bytes were not the expected message
    |   +-- ExecutorRefused        cannot be done, now or later: a constraint that does not compile
    +-- NotFound
    |   +-- ModelNotFound
    |   +-- AdapterNotFound
    |   +-- RequestNotFound        cancel of a request that is not live, or not yours
    +-- AlreadyExists
    |   +-- RequestIdInUse         a request with this id is in flight; it goes on unharmed
    |   +-- ModelExists
    +-- ResourceExhausted          see `retry_after_s`
    |   +-- QueueFull
    |   +-- QuotaExceeded
    |   +-- ReaderStalled          the stream was not read for too long
    |   +-- BacklogFull            found by the client: too many calls of its own wait
    +-- DeadlineExceeded           see `deadline_s`
    |   +-- DeadlineUnreachable    it could not have been met; see `estimate_s`, `retry_after_s`
    +-- Unavailable                nobody answers at the address, or the server takes no requests
    |   +-- Draining               the server is about to stop; try another
    |   +-- EngineDown
    +-- Unimplemented
    |   +-- FeatureUnsupported     metadata["feature"] names what this server or model lacks
    +-- Internal                   the server's fault
    |   +-- ExecutorRequestFailed  the executor failed on this request alone
    +-- Unauthenticated
    +-- PermissionDenied
    +-- OutOfRange
    |   +-- SequenceUnavailable
    +-- FailedPrecondition
    |   +-- ModelNotReady          being loaded or unloaded, or could not be loaded
    |   +-- NotPossibleNow         told to operators; the message says why
    +-- Aborted
    |   +-- StreamSuperseded       another stream took the request over
    +-- CallCancelled              the call was cancelled by the server or a proxy
    +-- StreamBroken               the stream broke the contract: a gap, or no Finished at its end
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import grpc

ERROR_DOMAIN = "penstock.dev"
"""`google.rpc.ErrorInfo.domain` of the reasons in the table below."""

STREAM_BROKEN = "STREAM_BROKEN"
"""Reason of `StreamBroken`, which the client finds and no server sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One bad field: its path in the request message, e.g. "sampling.temperature"."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of a failed call.

    `reason` is a name of `ErrorReason` without its prefix, "" when the status carried none (a
    proxy, the network, gRPC itself). `retry_after_s`: seconds after which the server suggests to
    try again, None for no suggestion. `is_retry_refused`: the server asked not to retry.
    `metadata`: what ErrorInfo carried besides.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    is_retry_refused: bool = False
    field_violations: tuple[FieldViolation, ...] = ()
    request_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


class PenstockError(Exception):
    """A call failed. The properties are those of `Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        """One line: status, reason, message, and the fields that the message does not name."""
        is_told = self.reason in ("", self.code.name)
        reason = "" if is_told else f" ({self.reason})"
        fields = "".join(
            f"; {bad.field}: {bad.description}"
            for bad in self.field_violations
            if bad.field not in self.message
        )
        return f"{self.code.name}{reason}: {self.message}{fields}"

    def of_request(self, request_id: str) -> Self:
        """The same failure as it befell one request."""
        return type(self)(replace(self.failure, request_id=request_id))

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status."""
        return self.failure.code

    @property
    def reason(self) -> str:
        """For programs, e.g. "QUEUE_FULL"; "" when the status carried none."""
        return self.failure.reason

    @property
    def message(self) -> str:
        """For people; not for programs."""
        return self.failure.message

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the server suggests to try again."""
        return self.failure.retry_after_s

    @property
    def estimate_s(self) -> float | None:
        """Seconds from the request's arrival to what it was refused for want of, as foreseen.

        That is its first token or its end, whichever the deadline in question is for. None where
        the server has no estimate.
        """
        return _seconds(self.metadata.get("estimate_ms"))

    @property
    def chance(self) -> float | None:
        """Probability, 0 to 1, that the whole answer would have met its deadline.

        Of a request that was refused, dropped or given up for a small one; None of others.
        """
        try:
            return float(self.metadata["chance"])
        except (KeyError, ValueError):
            return None

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """The bad fields of an InvalidArgument."""
        return self.failure.field_violations

    @property
    def request_id(self) -> str:
        """The request, if the server told; "" otherwise."""
        return self.failure.request_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """Values that belong to the reason, e.g. `num_prompt_tokens`."""
        return self.failure.metadata


class InvalidArgument(PenstockError):
    """A field is missing or out of range."""


class PromptTooLong(InvalidArgument):
    """The prompt, or prompt and max_tokens together, exceed the model's context."""


class ExceedsKVCache(InvalidArgument):
    """The request would not fit the KV cache even alone."""


class MalformedRequest(InvalidArgument):
    """The bytes were not the expected message."""


class ExecutorRefused(InvalidArgument):
    """The executor cannot do what was asked, now or later, e.g. compile the constraint."""


class NotFound(PenstockError):
    """What the call names does not exist."""


class ModelNotFound(NotFound):
    """No such model is loaded."""


class AdapterNotFound(NotFound):
    """The model has no such adapter."""


class RequestNotFound(NotFound):
    """The request is not live, or not the caller's."""


class AlreadyExists(PenstockError):
    """What the call would create exists."""


class RequestIdInUse(AlreadyExists):
    """A request with this id is in flight; it goes on unharmed."""


class ModelExists(AlreadyExists):
    """The model is loaded already."""


class ResourceExhausted(PenstockError):
    """A limit was met."""


class QueueFull(ResourceExhausted):
    """The server's queue is full."""


class QuotaExceeded(ResourceExhausted):
    """The tenant has used its share."""


class ReaderStalled(ResourceExhausted):
    """The stream was not read for too long, and its backlog was cut."""


class BacklogFull(ResourceExhausted):
    """Too many calls of this client wait for their turn; nothing was sent."""


class DeadlineExceeded(PenstockError):
    """A deadline passed. `metadata["deadline"]` tells which: ttft, total, grpc or server."""

    @property
    def deadline_s(self) -> float | None:
        """Seconds from the request's arrival to that deadline; None if the server did not say."""
        return _seconds(self.metadata.get("deadline_ms"))


class DeadlineUnreachable(DeadlineExceeded):
    """Refused at once, or dropped from the queue: the deadline could not have been met.

    Nothing was computed for it. It is not tried again on its own, because the same deadline will
    usually have passed by then: whoever sets a new one may, after `retry_after_s`.
    """


class Unavailable(PenstockError):
    """Nobody answers at the address, or the server takes no requests."""


class Draining(Unavailable):
    """The server is about to stop."""


class EngineDown(Unavailable):
    """The engine stopped and could not take the request up again."""


class Unimplemented(PenstockError):
    """The server does not do this."""


class FeatureUnsupported(Unimplemented):
    """The request asks for a feature that this server or model lacks."""


class Internal(PenstockError):
    """A fault of the server, or an answer that makes no sense."""


class ExecutorRequestFailed(Internal):
    """The executor failed on this request alone."""


class Unauthenticated(PenstockError):
    """No credentials, or wrong ones."""


class PermissionDenied(PenstockError):
    """The credentials do not allow this."""


class OutOfRange(PenstockError):
    """What was asked for lies outside of what there is."""


class SequenceUnavailable(OutOfRange):
    """The messages asked for are no longer kept, or were never sent."""


class FailedPrecondition(PenstockError):
    """The server is not in a state to do this."""


class ModelNotReady(FailedPrecondition):
    """The model is being loaded or unloaded, or could not be loaded."""


class NotPossibleNow(FailedPrecondition):
    """What an operator asked for cannot be had now."""


class Aborted(PenstockError):
    """The call was ended in favour of another."""


class StreamSuperseded(Aborted):
    """Another stream took the request over; it goes on there."""


class CallCancelled(PenstockError):
    """The call was cancelled by the server or a proxy, not by this client."""


class StreamBroken(PenstockError):
    """The stream broke the contract: messages were lost, or it ended without Finished."""

    @classmethod
    def because(cls, message: str, request_id: str = "") -> "StreamBroken":
        """Make the error; its code is DATA_LOSS and its reason STREAM_BROKEN."""
        return cls(
            Failure(
                code=grpc.StatusCode.DATA_LOSS,
                reason=STREAM_BROKEN,
                message=message,
                request_id=request_id,
            )
        )


def _seconds(milliseconds: str | None) -> float | None:
    """What ErrorInfo tells as milliseconds; None for what is no number."""
    if milliseconds is None or not (milliseconds.isascii() and milliseconds.isdigit()):
        return None
    return int(milliseconds) / 1e3


_BY_CODE: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.CANCELLED: CallCancelled,
}

_BY_REASON: Mapping[tuple[grpc.StatusCode, str], type[PenstockError]] = {
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"): InvalidArgument,
    (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"): PromptTooLong,
    (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_KV_CACHE"): ExceedsKVCache,
    (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST"): MalformedRequest,
    (grpc.StatusCode.INVALID_ARGUMENT, "EXECUTOR_REFUSED"): ExecutorRefused,
    (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"): ModelNotFound,
    (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"): AdapterNotFound,
    (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"): RequestNotFound,
    (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE"): RequestIdInUse,
    (grpc.StatusCode.ALREADY_EXISTS, "MODEL_EXISTS"): ModelExists,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"): QueueFull,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"): QuotaExceeded,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_STALLED"): ReaderStalled,
    (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"): DeadlineUnreachable,
    (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"): DeadlineExceeded,
    (grpc.StatusCode.UNAVAILABLE, "DRAINING"): Draining,
    (grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN"): EngineDown,
    (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED"): FeatureUnsupported,
    (grpc.StatusCode.INTERNAL, "EXECUTOR_REQUEST_FAILED"): ExecutorRequestFailed,
    (grpc.StatusCode.INTERNAL, "INTERNAL"): Internal,
    (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"): Unauthenticated,
    (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"): PermissionDenied,
    (grpc.StatusCode.OUT_OF_RANGE, "SEQUENCE_UNAVAILABLE"): SequenceUnavailable,
    (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_NOT_READY"): ModelNotReady,
    (grpc.StatusCode.FAILED_PRECONDITION, "NOT_POSSIBLE_NOW"): NotPossibleNow,
    (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED"): StreamSuperseded,
}


def error_of(failure: Failure) -> PenstockError:
    """Make the exception for a failure: by status and reason, else by status alone.

    A reason that does not belong to the status is not believed; a status outside the table gives
    a plain PenstockError.
    """
    by_code = _BY_CODE.get(failure.code, PenstockError)
    return _BY_REASON.get((failure.code, failure.reason), by_code)(failure)
