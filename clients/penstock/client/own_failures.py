"""Makes the exceptions for failures that the client detects itself.

Owns their codes and messages, for both clients.
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
    """Return the error of a call that exceeds the backlog of this client."""
    return BacklogFull(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason=BACKLOG_FULL,
            message=f"{num_open} calls of this client are open and {num_waiting} wait",
        )
    )


def client_closed() -> CallCancelled:
    """Return the error of a call that was open when the client was closed."""
    return CallCancelled(Failure(code=grpc.StatusCode.CANCELLED, message="the client was closed"))


def request_cancelled(request_id: str) -> CallCancelled:
    """Return the error of a request that the client cancelled."""
    return CallCancelled(
        Failure(
            code=grpc.StatusCode.CANCELLED,
            message="the client cancelled the request",
            request_id=request_id,
        )
    )


def request_too_large(num_bytes: int, max_bytes: int) -> ResourceExhausted:
    """Return the error of a request that gRPC would refuse by its size, ending the shared call."""
    return ResourceExhausted(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            message=f"the request has {num_bytes} bytes, and may have {max_bytes}",
        )
    )


def unless_asked(error: PenstockError) -> PenstockError:
    """Convert a call that the server or a proxy cancelled before it started to Unavailable.

    A server that shuts down cancels calls that reach it at the same time and have no handler yet. A
    status with a reason was intended and is unchanged.
    """
    if not isinstance(error, CallCancelled) or error.reason:
        return error
    return Unavailable(
        replace(
            error.failure,
            code=grpc.StatusCode.UNAVAILABLE,
            message="the call was cancelled on its way, and not by this client",
        )
    )


def deadline_passed(request_id: str = "") -> DeadlineExceeded:
    """Return the error of a call whose deadline passed on the client's clock."""
    return DeadlineExceeded(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            message="the call's deadline passed",
            request_id=request_id,
        )
    )


def multiplex_ended() -> Unavailable:
    """Return the error of requests that were open when a Multiplex call ended with OK."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the server ended the Multiplex call")
    )


def multiplex_broken() -> Unavailable:
    """Return the error of a Multiplex call that failed to write and received no status."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the Multiplex call broke")
    )


def multiplex_error(error: PenstockError) -> PenstockError:
    """Return the error of each request when its Multiplex call fails.

    A closing client fails its requests first, so a cancelled call was not cancelled by this client.
    """
    if isinstance(error, Unimplemented) and not error.reason:
        return Unimplemented(
            Failure(
                code=grpc.StatusCode.UNIMPLEMENTED,
                message="the server does not offer Multiplex: use a client without multiplex",
            )
        )
    return unless_asked(error)
