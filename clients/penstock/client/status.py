"""Converts the status of a failed call or request, with its google.rpc details and retry push-back,
to a typed error.

Reads the trailers of a call, and the Status inside a Multiplex message. `errors.py` chooses the
class of the error.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from google.rpc import error_details_pb2, status_pb2
from penstock.client.errors import (
    Failure,
    FieldViolation,
    PenstockError,
    error_of,
)
from penstock.client.local_errors import cancelled_to_unavailable
from penstock.conventions import ERROR_DOMAIN, PUSHBACK_KEY, STATUS_DETAILS_KEY

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(slots=True)
class _Details:
    """The details read from the trailers or the status so far."""

    reason: str = ""
    metadata: dict[str, str] | None = None
    retry_after_s: float | None = None
    is_retry_forbidden: bool = False
    field_violations: tuple[FieldViolation, ...] = ()
    request_id: str = ""


def error_from_call(
    call: grpc.RpcError, *, request_id: str = "", address: str = ""
) -> PenstockError:
    """Return the typed error for a call that ended with a status other than OK.

    `request_id` is the id of the request if known, in case the status does not have it. `address`
    is the server's address. Details that cannot be parsed are left out, so that they do not hide
    the status.
    """
    if not isinstance(call, grpc.Call | grpc.aio.AioRpcError):
        return error_of(
            Failure(code=grpc.StatusCode.UNKNOWN, message=str(call), request_id=request_id)
        )
    details = _read_trailers(call.trailing_metadata() or ())
    return _error(call.code(), call.details() or "", details, request_id, address)


def as_error(
    failed: grpc.RpcError | PenstockError,
    *,
    request_id: str = "",
    is_client_cancellation: bool = False,
    address: str = "",
) -> PenstockError:
    """Return the typed error for a failed attempt; a PenstockError is returned unchanged.

    `request_id` is "" until the server responds. `is_client_cancellation` is True if this client
    cancelled the call; otherwise the error of a call that was cancelled without a response and
    without a reason is Unavailable. `address` is the server's address.
    """
    if isinstance(failed, PenstockError):
        return failed
    error = error_from_call(failed, request_id=request_id, address=address)
    return error if is_client_cancellation or request_id else cancelled_to_unavailable(error)


def error_cause(failed: grpc.RpcError | PenstockError) -> grpc.RpcError | None:
    """Return the `__cause__` for the result of `as_error`; None if that result is `failed`
    itself."""
    return None if isinstance(failed, PenstockError) else failed


def error_from_status(status: Status, *, request_id: str = "") -> PenstockError:
    """Return the typed error for a request that failed on a Multiplex call. The rest is as in
    `error_from_call`.

    OK, and a code that gRPC does not define, become UNKNOWN.
    """
    details = _Details()
    _read_details(status.details, details)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        code = grpc.StatusCode.UNKNOWN
    return _error(code, status.message, details, request_id)


def _error(
    code: grpc.StatusCode, message: str, details: _Details, request_id: str, address: str = ""
) -> PenstockError:
    return error_of(
        Failure(
            code=code,
            message=message,
            reason=details.reason,
            retry_after_s=details.retry_after_s,
            is_retry_forbidden=details.is_retry_forbidden,
            field_violations=details.field_violations,
            request_id=details.request_id or request_id,
            metadata=details.metadata or {},
            address=address,
        )
    )


def _read_trailers(trailers: Iterable[tuple[str, str | bytes]]) -> _Details:
    details = _Details()
    pushback: str | None = None
    for key, value in trailers:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            _read_status(value, details)
        elif key == PUSHBACK_KEY:
            pushback = value if isinstance(value, str) else value.decode("ascii", "replace")
    if pushback is not None:
        _read_pushback(pushback, details)
    return details


def _read_pushback(value: str, details: _Details) -> None:
    """Read the retry push-back of gRFC A6 into `details`, unless they already have a longer delay.

    `value` has the milliseconds to wait. A negative or invalid value sets `is_retry_forbidden`.
    """
    try:
        pushback_ms = int(value)
    except ValueError:
        pushback_ms = -1
    if pushback_ms < 0:
        details.is_retry_forbidden = True
    else:
        details.retry_after_s = max(details.retry_after_s or 0.0, pushback_ms / 1e3)


def _read_status(value: bytes, details: _Details) -> None:
    try:
        status = status_pb2.Status.FromString(value)
    except DecodeError:
        return
    _read_details(status.details, details)


def _read_details(packed: Iterable[Any], details: _Details) -> None:
    try:
        for detail in packed:
            info = error_details_pb2.ErrorInfo()
            retry = error_details_pb2.RetryInfo()
            bad_request = error_details_pb2.BadRequest()
            request_info = error_details_pb2.RequestInfo()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                details.reason = info.reason
                details.metadata = dict(info.metadata)
            elif detail.Unpack(retry):
                details.retry_after_s = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
            elif detail.Unpack(bad_request):
                details.field_violations = tuple(
                    FieldViolation(field=bad.field, description=bad.description)
                    for bad in bad_request.field_violations
                )
            elif detail.Unpack(request_info):
                details.request_id = request_info.request_id
    except DecodeError:
        return
