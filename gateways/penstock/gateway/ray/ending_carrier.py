"""Sends the end of a call, with its trailers, from a replica to the caller.

Defines the values that a method passes to Serve instead of protobuf messages. Serve calls
`SerializeToString` on each value that a method yields.

If the replica itself is the ingress (`RAY_SERVE_ENABLE_HA_PROXY`), the status that a method sets on
its context is sent when the method returns. If Serve's proxy is in between, the context is sent
only together with a message. Serve has two public ways to end a failed stream. An exception drops
the trailers with the google.rpc details; one more message would also reach the caller. The proxy
also accepts an object of its private class `ResponseStatus` instead of a message: it ends the
stream and sends the context, but Serve does not guarantee this. If a release has no such class,
failed streams have only their status and message; a test on a real cluster detects this.
"""

import enum
import importlib
from typing import Any


class EndingMethod(enum.Enum):
    """How the end of a stream is sent.

    Attributes:
        RETURN: The method returns.
        CARRIER: The method yields an `EndingCarrier`.
        EXCEPTION: The method raises an exception; this drops the trailers.
    """

    RETURN = enum.auto()
    CARRIER = enum.auto()
    EXCEPTION = enum.auto()


class RawMessage:
    """A serialised message. Serve accepts it like a protobuf message."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Serve calls
        """Return the serialised message unchanged. Called by Serve."""
        return self._data


class EndingCarrier:
    """The end of a stream, passed to Serve as the last item of the stream
    (`EndingMethod.CARRIER`)."""

    __slots__ = ("_code", "_message")

    def __init__(self, code: Any, message: str) -> None:
        self._code = code
        self._message = message

    def SerializeToString(self) -> Any:  # noqa: N802 - the name that Serve calls
        """Return Serve's private `ResponseStatus`; Serve's proxy accepts it as the end of a stream.
        Called by Serve."""
        return _private("proxy_request_response", "ResponseStatus")(
            code=self._code, message=self._message
        )


def ending_method() -> EndingMethod:
    """Return the method that must be used to end a stream, given the installed version of Ray and
    its settings.
    """
    if _private("constants", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
        return EndingMethod.RETURN
    is_there = _private("proxy_request_response", "ResponseStatus") is not None
    return EndingMethod.CARRIER if is_there else EndingMethod.EXCEPTION


def _private(module: str, name: str) -> Any:
    """Return a private attribute of Serve; None if this release does not have it."""
    try:
        return getattr(importlib.import_module(f"ray.serve._private.{module}"), name, None)
    except ImportError:
        return None
