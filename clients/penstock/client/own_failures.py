"""Failures that the client detects itself, as the exceptions of the corresponding status.

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
    """Too many calls are queued in this client."""
    return BacklogFull(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason=BACKLOG_FULL,
            message=f"{num_open} calls of this client are open and {num_waiting} wait",
        )
    )


def client_closed() -> CallCancelled:
    """The client was closed while the call was under way."""
    return CallCancelled(Failure(code=grpc.StatusCode.CANCELLED, message="the client was closed"))


def request_cancelled(request_id: str) -> CallCancelled:
    """The client cancelled the request."""
    return CallCancelled(
        Failure(
            code=grpc.StatusCode.CANCELLED,
            message="the client cancelled the request",
            request_id=request_id,
        )
    )


def request_too_large(num_bytes: int, max_bytes: int) -> ResourceExhausted:
    """A request that would end the call it shares: gRPC refuses messages by their size."""
    return ResourceExhausted(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            message=f"the request has {num_bytes} bytes, and may have {max_bytes}",
        )
    )


def unless_asked(error: PenstockError) -> PenstockError:
    """A call cancelled by the server or a proxy before it started counts as not served.

    A server that shuts down does so with calls that reach it in the same moment: gRPC cancels what
    no handler has seen yet. A reason would mean that it was intended.
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
    """The deadline of a call passed on the client's clock."""
    return DeadlineExceeded(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            message="the call's deadline passed",
            request_id=request_id,
        )
    )


def multiplex_ended() -> Unavailable:
    """The server ended a Multiplex call with OK although requests were open."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the server ended the Multiplex call")
    )


def multiplex_broken() -> Unavailable:
    """A Multiplex call could not be written to, and no status was received."""
    return Unavailable(
        Failure(code=grpc.StatusCode.UNAVAILABLE, message="the Multiplex call broke")
    )


def multiplex_error(error: PenstockError) -> PenstockError:
    """The error of each request when its Multiplex call fails.

    A closing client fails its requests first: a cancelled call was cancelled by another party.
    """
    if isinstance(error, Unimplemented) and not error.reason:
        return Unimplemented(
            Failure(
                code=grpc.StatusCode.UNIMPLEMENTED,
                message="the server does not offer Multiplex: use a client without multiplex",
            )
        )
    return unless_asked(error)
