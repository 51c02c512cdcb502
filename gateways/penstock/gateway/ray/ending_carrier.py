"""Carries the end of a call, with its trailers, from a replica to the caller.

Owns the values that a method passes to Serve in place of protobuf messages, and the way that an end
takes. Serve calls `SerializeToString` on whatever a method yields.

Where the replica itself is the ingress (`RAY_SERVE_ENABLE_HA_PROXY`), the status that a method sets
on its context goes out when the method returns. Where Serve's proxy stands between, the context
travels with each message, and with nothing else: Serve's public ways to fail a stream either drop
the trailers, where the google.rpc details are (an exception), or cost the caller a message too many
(a yield). The proxy does take an object of its class `ResponseStatus` for the end in place of a
message, context included, which is not promised. Where a release has no such class, failed streams
keep their status and their message alone; a test on a real cluster detects this.
"""

import enum
import importlib
from typing import Any


class Way(enum.Enum):
    """How the end of a stream is sent; what was set on the context goes with the first two."""

    RETURN = enum.auto()
    CARRIER = enum.auto()
    EXCEPTION = enum.auto()


class RawMessage:
    """A message that is bytes already."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Serve calls
        """The message."""
        return self._data


class EndingCarrier:
    """The end of a stream as an item of it, for `Way.CARRIER`."""

    __slots__ = ("_code", "_message")

    def __init__(self, code: Any, message: str) -> None:
        self._code = code
        self._message = message

    def SerializeToString(self) -> Any:  # noqa: N802 - the name that Serve calls
        """The bytes that the proxy takes as the end."""
        return _private("proxy_request_response", "ResponseStatus")(
            code=self._code, message=self._message
        )


def way_of_endings() -> Way:
    """How the installed version of Ray reports the end of a stream."""
    if _private("constants", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
        return Way.RETURN
    is_there = _private("proxy_request_response", "ResponseStatus") is not None
    return Way.CARRIER if is_there else Way.EXCEPTION


def _private(module: str, name: str) -> Any:
    """A private attribute of Serve; None if this release lacks it."""
    try:
        return getattr(importlib.import_module(f"ray.serve._private.{module}"), name, None)
    except ImportError:
        return None
