"""The exceptions of calls, and the table from status and reason to exception class.

Defines the exception tree. `status.py` reads the status of a call.

    PenstockError                  every failure of a call; catch this to catch them all
    +-- InvalidArgument            a field is missing or out of range; see `field_violations`
    |   +-- PromptTooLong          the prompt, with max_tokens, exceeds the model's context
    |   +-- ExceedsKVCache         the request would not fit into the KV cache even alone
    |   +-- MalformedRequest       the server could not parse the message
    |   +-- ExecutorRejected       the executor cannot run it, e.g. an invalid constraint
    +-- NotFound
    |   +-- ModelNotFound
    |   +-- AdapterNotFound
    |   +-- RequestNotFound        the request is not live, or belongs to another tenant
    +-- AlreadyExists
    |   +-- RequestIdInUse         a live request has this id; it is not affected
    |   +-- ModelExists
    +-- ResourceExhausted          see `retry_after_s`
    |   +-- QueueFull
    |   +-- QuotaExceeded
    |   +-- ReaderStalled          the stream was not read for too long, or is too far behind
    |   +-- BacklogFull            raised by the client: too many of its calls wait
    +-- DeadlineExceeded           see `deadline_s`
    |   +-- DeadlineUnreachable    the deadline cannot be met; see `estimate_s`, `retry_after_s`
    +-- Unavailable                no server at the address, or it takes no requests
    |   +-- Draining               the server is about to stop; try another
    |   +-- EngineDown
    +-- Unimplemented
    |   +-- FeatureUnsupported     metadata["feature"] names what this server or model lacks
    +-- Internal                   an error in the server
    |   +-- ExecutorRequestFailed  the executor failed on this request, not on others
    +-- Unauthenticated
    +-- PermissionDenied
    +-- OutOfRange
    |   +-- SequenceUnavailable
    +-- FailedPrecondition
    |   +-- ModelNotReady          the model is being loaded or unloaded, or could not be loaded
    |   +-- NotPossibleNow         an operations call; the message has the reason
    +-- Aborted
    |   +-- StreamSuperseded       another stream resumed the request
    +-- CallCancelled              by the server, by a proxy, or because this client was closed
    +-- StreamBroken               the messages violated the protocol, e.g. a gap
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import unquote

import grpc

STREAM_BROKEN = "STREAM_BROKEN"
"""Reason of `StreamBroken`, which the client raises and no server sends."""


# Advice by a part of gRPC's message, for failures that no service reported.
_HINTS = {
    "Connection refused": "no service at {address}: is `penstock serve` running?",
    "No such file or directory": "no service at {address}: is `penstock serve` running?",
    "Failed parsing HTTP/2": "{address} is not a gRPC port: `penstock serve` prints its ports",
    "handshake failed": "only one side uses TLS, or the certificate is not trusted",
    "Domain name not found": "no such host: {address}",
    "Deadline Exceeded": "the deadline passed before the call ended",
}
_WRONG_PORT = (
    "wrong port, or an older service, at {address}: operations calls (`penstock top`) need the"
    " operations port, all others the main port; `penstock serve` prints both"
)
_ADDRESS = re.compile(r"\b(?:ipv[46]|unix):(\S+?): ")
_NUM_MORE = re.compile(r" \(and \d+ more\)$")
_CONNECTING = re.compile(
    r"^failed to connect to all addresses; last error: [A-Z_]+: \S+ (?:Failed to connect[^:]*: )?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """An invalid field of a request.

    `field` is its path, e.g. "sampling.temperature"; `description` is the reason.
    """

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The details of a failed call.

    Attributes:
        code: The gRPC status.
        message: Text for humans.
        reason: Name of the reason, e.g. "QUEUE_FULL"; "" if there is none, e.g. because a proxy,
            the network or gRPC caused the failure.
        retry_after_s: Seconds after which the server suggests a retry; None for no suggestion.
        is_retry_forbidden: Whether the server requested that the call is not retried.
        field_violations: The invalid fields of a request.
        request_id: The id of the request; "" if unknown.
        metadata: Additional values for the reason, from `google.rpc.ErrorInfo`.
        address: The address that was called, or several separated by commas; "" if unknown.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_after_s: float | None = None
    is_retry_forbidden: bool = False
    field_violations: tuple[FieldViolation, ...] = ()
    request_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    address: str = ""


class PenstockError(Exception):
    """A failed call. Its text has the status and the message and, if they are set, the reason, the
    invalid fields, the estimated time, the retry time and the request id.

    If the failure has no reason and is UNIMPLEMENTED or has a common message of gRPC, e.g.
    "Connection refused", the text starts with advice on what to check.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        """Format the failure as one line, see the class."""
        reason = "" if self.reason in ("", self.code.name) else f" ({self.reason})"
        message = _CONNECTING.sub("", self.message)
        if self.field_violations:
            # The message has only the first field.
            message = _NUM_MORE.sub("", message)
        parts = [f"{self.code.name}{reason}: {message}"]
        parts += [
            f"{bad.field}: {bad.description}"
            for bad in self.field_violations
            if f"{bad.field}: {bad.description}" not in message
        ]
        if "num_more_violations" in self.metadata:
            parts.append(f"and {self.metadata['num_more_violations']} more")
        if self.estimate_s is not None:
            parts.append(f"estimated time {self.estimate_s:g} s")
        if self.retry_after_s is not None:
            parts.append(f"retry in {self.retry_after_s:g} s")
        request = f" [request {self.request_id}]" if self.request_id else ""
        line = "; ".join(parts) + request
        hint = self._hint()
        return f"{hint} ({line})" if hint else line

    def _hint(self) -> str:
        """Return advice on what to check; empty if there is none, or if the failure has a
        reason."""
        if self.reason:
            return ""
        found = _ADDRESS.search(self.message)
        address = unquote(found[1]) if found else self.failure.address or "the address"
        if self.code is grpc.StatusCode.UNIMPLEMENTED and self.failure.address:
            # The server lacks the service or the method. Errors of the client have no address.
            hint = _WRONG_PORT
        else:
            hint = next((hint for words, hint in _HINTS.items() if words in self.message), "")
        return hint.format(address=address)

    def of_request(self, request_id: str) -> Self:
        """Return a copy of this error with this request id."""
        return type(self)(replace(self.failure, request_id=request_id))

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status."""
        return self.failure.code

    @property
    def reason(self) -> str:
        """The reason, for programs, e.g. "QUEUE_FULL"; "" if the status has none."""
        return self.failure.reason

    @property
    def message(self) -> str:
        """The message for humans. Programs should use `reason`."""
        return self.failure.message

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the server suggests a retry; None for no suggestion."""
        return self.failure.retry_after_s

    @property
    def estimate_s(self) -> float | None:
        """Estimated seconds from the request's arrival to the event whose deadline cannot be met,
        such as the first token; None without an estimate."""
        return _seconds(self.metadata.get("estimate_ms"))

    @property
    def chance(self) -> float | None:
        """The predicted probability, from 0 to 1, that the request would have met its deadline.

        None unless the request failed because this probability was too low.
        """
        try:
            return float(self.metadata["chance"])
        except (KeyError, ValueError):
            return None

    @property
    def field_violations(self) -> tuple[FieldViolation, ...]:
        """The invalid fields of an InvalidArgument; empty for other failures."""
        return self.failure.field_violations

    @property
    def request_id(self) -> str:
        """The id of the request; "" if unknown."""
        return self.failure.request_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """Additional values for the reason, e.g. `num_prompt_tokens`."""
        return self.failure.metadata


class InvalidArgument(PenstockError):
    """A field of the request is missing or out of range."""


class PromptTooLong(InvalidArgument):
    """The prompt, or prompt and max_tokens together, exceed the model's context."""


class ExceedsKVCache(InvalidArgument):
    """The request would not fit into the KV cache even if it were alone."""


class MalformedRequest(InvalidArgument):
    """The server could not parse the message."""


class ExecutorRejected(InvalidArgument):
    """The executor cannot run this request, e.g. because its constraint does not compile."""


class NotFound(PenstockError):
    """The named object does not exist."""


class ModelNotFound(NotFound):
    """No model with this name is loaded."""


class AdapterNotFound(NotFound):
    """The model has no adapter with this name."""


class RequestNotFound(NotFound):
    """The server does not have the request, or no longer has it, or it belongs to another tenant,
    or it has no resume timeout and cannot be resumed."""


class AlreadyExists(PenstockError):
    """An object with this name already exists."""


class RequestIdInUse(AlreadyExists):
    """A live request already has this id. The live request is not affected."""


class ModelExists(AlreadyExists):
    """The model is already loaded."""


class ResourceExhausted(PenstockError):
    """A limit was reached: of the server, of a tenant's quota, of a message's size, or of this
    client."""


class QueueFull(ResourceExhausted):
    """The server's queue is full."""


class QuotaExceeded(ResourceExhausted):
    """A quota of the tenant is exceeded. The message names the quota."""


class ReaderStalled(ResourceExhausted):
    """The client did not read the stream for too long, or left too many tokens unread, so the
    server ended it."""


class BacklogFull(ResourceExhausted):
    """Too many generations are waiting in this client (see `PoolConfig.max_waiting_calls`). Nothing
    was sent."""


class DeadlineExceeded(PenstockError):
    """A deadline passed. If the server detected this, `metadata["deadline"]` is the kind of the
    deadline: ttft, total, grpc or server."""

    @property
    def deadline_s(self) -> float | None:
        """Seconds from the request's arrival to the deadline that passed; None if unknown."""
        return _seconds(self.metadata.get("deadline_ms"))


class DeadlineUnreachable(DeadlineExceeded):
    """The deadline cannot be met, or is unlikely to be met (see `chance`).

    The request was rejected, dropped from the queue, or ended while it ran. The client does not
    retry, because the deadline would pass before the server's retry time. The caller may retry
    after `retry_after_s`, with a new deadline.
    """


class Unavailable(PenstockError):
    """There is no server at the address, or it accepts no requests."""


class Draining(Unavailable):
    """The server accepts no more requests, because it is about to stop."""


class EngineDown(Unavailable):
    """No engine is running, or the engine stopped and could not continue the request."""


class Unimplemented(PenstockError):
    """The server does not implement the called method."""


class FeatureUnsupported(Unimplemented):
    """The request needs a feature that this server or model does not have."""


class Internal(PenstockError):
    """An error in the server, or an invalid response."""


class ExecutorRequestFailed(Internal):
    """The executor failed on this request. Other requests are not affected."""


class Unauthenticated(PenstockError):
    """Credentials are missing or invalid."""


class PermissionDenied(PenstockError):
    """The credentials do not permit this call."""


class OutOfRange(PenstockError):
    """A value is outside its valid range (OUT_OF_RANGE)."""


class SequenceUnavailable(OutOfRange):
    """The stream cannot be resumed at this position, or is no longer kept."""


class FailedPrecondition(PenstockError):
    """The current state of the server does not allow this call."""


class ModelNotReady(FailedPrecondition):
    """The model is being loaded or unloaded, or could not be loaded."""


class NotPossibleNow(FailedPrecondition):
    """The operations call is not possible in the current state of the server. The message has the
    reason."""


class Aborted(PenstockError):
    """Another call replaced this one."""


class StreamSuperseded(Aborted):
    """Another stream resumed the request and continues it."""


class CallCancelled(PenstockError):
    """The call was cancelled by the server, by a proxy, or by this client. The client may cancel
    one request of a Multiplex call; when it is closed, it cancels all calls.
    """


class StreamBroken(PenstockError):
    """The server's messages violated the protocol, e.g. messages of a stream were lost, a
    generation ended without Finished, or a paged list had no last page.
    """

    @classmethod
    def with_message(cls, message: str, request_id: str = "") -> "StreamBroken":
        """Return the error with the message `message`, the code DATA_LOSS and the reason
        STREAM_BROKEN."""
        return cls(
            Failure(
                code=grpc.StatusCode.DATA_LOSS,
                reason=STREAM_BROKEN,
                message=message,
                request_id=request_id,
            )
        )


def _seconds(milliseconds: str | None) -> float | None:
    """Convert a text with milliseconds in ErrorInfo to seconds; return None if it is missing or is
    not a whole number."""
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
    (grpc.StatusCode.INVALID_ARGUMENT, "EXECUTOR_REJECTED"): ExecutorRejected,
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
    """Return the exception for a failure; its class depends on the status and the reason.

    If the reason is unknown or does not belong to the status, the class depends only on the status.
    A status that is not in the table becomes a plain PenstockError.
    """
    by_code = _BY_CODE.get(failure.code, PenstockError)
    return _BY_REASON.get((failure.code, failure.reason), by_code)(failure)
