"""Creates the exceptions for failures that the client itself detects or interprets.

Defines their codes and messages, for the asynchronous and the blocking client.
"""

from dataclasses import replace

import grpc

from penstock.client.errors import (
    BacklogFull,
    CallCancelled,
    DeadlineExceeded,
    Failure,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)

BACKLOG_FULL = "BACKLOG_FULL"
"""Reason of `BacklogFull`, which no server sends."""


def backlog_full(num_open: int, num_waiting: int) -> BacklogFull:
    """Return the error for a generation that cannot wait, because too many others of this client
    wait."""
    return BacklogFull(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason=BACKLOG_FULL,
            message=f"{num_open} calls of this client are open and {num_waiting} wait",
        )
    )


def client_closed() -> CallCancelled:
    """Return the error for a call that was open when the client was closed."""
    return CallCancelled(Failure(code=grpc.StatusCode.CANCELLED, message="the client was closed"))


def request_cancelled(request_id: str) -> CallCancelled:
    """Return the error for a request that the client cancelled."""
    return CallCancelled(
        Failure(
            code=grpc.StatusCode.CANCELLED,
            message="the client cancelled the request",
            request_id=request_id,
        )
    )


def request_too_large(num_bytes: int, max_bytes: int) -> ResourceExhausted:
    """Return the error for a request that is too large for a Multiplex call. gRPC would end the
    whole call."""
    return ResourceExhausted(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            message=f"the request has {num_bytes} bytes; the limit is {max_bytes}",
        )
    )


def cancelled_to_unavailable(error: PenstockError) -> PenstockError:
    """Convert CallCancelled without a reason to Unavailable; return other errors unchanged.

    For calls that this client did not cancel: a server that shuts down cancels calls that have
    arrived and have no handler yet. If the error has a reason, the service cancelled the call
    deliberately.
    """
    if not isinstance(error, CallCancelled) or error.reason:
        return error
    return Unavailable(
        replace(
            error.failure,
            code=grpc.StatusCode.UNAVAILABLE,
            message="the server or a proxy cancelled the call, not this client",
        )
    )


def deadline_passed(request_id: str = "") -> DeadlineExceeded:
    """Return the error for a call whose deadline passed on the client's clock."""
    return DeadlineExceeded(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            message="the call's deadline passed",
            request_id=request_id,
        )
    )


def multiplex_ended() -> Unavailable:
    """Return the error for requests that were open when a Multiplex call ended with OK."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the server ended the Multiplex call")
    )


def multiplex_broken() -> Unavailable:
    """Return the error for a Multiplex call on which a write failed and for which no status
    arrived."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the Multiplex call broke")
    )


def multiplex_error(error: PenstockError) -> PenstockError:
    """Return the error for each request when its Multiplex call fails.

    The message for UNIMPLEMENTED gives advice. CANCELLED becomes Unavailable: a client that closes
    has already failed its requests, so the server or a proxy must have cancelled this call.
    """
    if isinstance(error, Unimplemented) and not error.reason:
        return Unimplemented(
            Failure(
                code=grpc.StatusCode.UNIMPLEMENTED,
                message="the server does not offer Multiplex: use a client without multiplex",
            )
        )
    return cancelled_to_unavailable(error)
