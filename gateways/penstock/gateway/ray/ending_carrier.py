"""Carries the end of a call, with its trailers, from a replica to the caller.

Owns the values that a method passes to Serve in place of protobuf messages, and how an end is sent.
Serve calls `SerializeToString` on every value that a method yields.

If the replica itself is the ingress (`RAY_SERVE_ENABLE_HA_PROXY`), the status that a method sets on
its context is sent when the method returns. If Serve's proxy is in between, the context is sent
only together with a message: Serve's public ways to fail a stream either drop the trailers, which
have the google.rpc details (an exception), or send the caller one message too many (a yield). The
proxy also accepts an object of its class `ResponseStatus` in place of a message as the end,
including the context, but Serve does not guarantee this. If a release has no such class, failed
streams keep only their status and their message; a test on a real cluster detects this.
"""

import enum
import importlib
from typing import Any


class Way(enum.Enum):
    """How the end of a stream is sent; the first two also send what was set on the context."""

    RETURN = enum.auto()
    CARRIER = enum.auto()
    EXCEPTION = enum.auto()


class RawMessage:
    """A message that is already serialised."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Serve calls
        """Return the message."""
        return self._data


class EndingCarrier:
    """The end of a stream as its last item, for `Way.CARRIER`."""

    __slots__ = ("_code", "_message")

    def __init__(self, code: Any, message: str) -> None:
        self._code = code
        self._message = message

    def SerializeToString(self) -> Any:  # noqa: N802 - the name that Serve calls
        """Return the object that the proxy accepts as the end."""
        return _private("proxy_request_response", "ResponseStatus")(
            code=self._code, message=self._message
        )


def way_of_endings() -> Way:
    """Return how the installed version of Ray reports the end of a stream."""
    if _private("constants", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
        return Way.RETURN
    is_there = _private("proxy_request_response", "ResponseStatus") is not None
    return Way.CARRIER if is_there else Way.EXCEPTION


def _private(module: str, name: str) -> Any:
    """Return a private attribute of Serve; None if this release lacks it."""
    try:
        return getattr(importlib.import_module(f"ray.serve._private.{module}"), name, None)
    except ImportError:
        return None
