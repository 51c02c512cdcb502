"""Reads the W3C trace context of a call, writes the response headers, and generates ids.

The format is specified in https://www.w3.org/TR/trace-context/. Accepts values of HTTP headers or
gRPC metadata, as str or bytes. Malformed values are treated as absent, because an invalid trace
context must never fail a request.
"""

import os
import re
import weakref
from dataclasses import dataclass
from typing import Final

from penstock.server.observe.request_record import TraceParent

TRACEPARENT_KEY: Final = "traceparent"
TRACESTATE_KEY: Final = "tracestate"
TRACE_ID_KEY: Final = "x-trace-id"
TRACERESPONSE_KEY: Final = "traceresponse"
MAX_TRACE_STATE_CHARS: Final = 512
NOT_TRACED: Final = TraceParent(trace_id=b"", span_id=b"")
"""Trace context of a request that is not traced."""

_VERSION_0_CHARS = 55
_NUM_BYTES = 26
_NO_VERSION = 0xFF
_TRACE_STATE = re.compile(r"[\x20-\x7e\t]*")
_IS_SAMPLED = 1
_NO_TRACE_ID, _NO_SPAN_ID = bytes(16), bytes(8)
_POOL_BYTES = 4096


@dataclass(slots=True)
class RemoteParent:
    """The span of the caller: trace id (16 bytes), span id (8 bytes), sampling decision and trace
    state.

    It must not be modified. It is not frozen, because every request creates one, and creating a
    frozen instance is slower.
    """

    trace_id: bytes
    span_id: bytes
    is_sampled: bool
    trace_state: str = ""


def parse_traceparent(value: str | bytes, trace_state: str | bytes = "") -> RemoteParent | None:
    """Parse a `traceparent` header; return None if it is malformed.

    For versions after 00, only the fields of version 00 are read, as the specification requires. A
    `trace_state` that is not printable ASCII is dropped. If it has more than MAX_TRACE_STATE_CHARS
    characters, its last members are dropped.
    """
    text = _text_of(value)
    head = text[:_VERSION_0_CHARS]
    if len(head) < _VERSION_0_CHARS or not head[2] == head[35] == head[52] == "-":
        return None
    # Upper-case digits are invalid here.
    if head.lower() != head:
        return None
    try:
        data = bytes.fromhex(head.replace("-", ""))
    except ValueError:
        return None
    # Blanks or dashes among the digits give too few bytes.
    if len(data) != _NUM_BYTES or data[0] == _NO_VERSION:
        return None
    # Later versions may have more fields.
    if len(text) > _VERSION_0_CHARS and (not data[0] or text[_VERSION_0_CHARS] != "-"):
        return None
    trace_id, span_id = data[1:17], data[17:25]
    if trace_id == _NO_TRACE_ID or span_id == _NO_SPAN_ID:
        return None
    is_sampled = data[25] & _IS_SAMPLED == _IS_SAMPLED
    kept_state = _bounded(_text_of(trace_state)) if trace_state else ""
    return RemoteParent(trace_id, span_id, is_sampled, kept_state)


def trace_response(trace: TraceParent) -> str:
    """Return the `traceresponse` header of a request.

    The sampled flag is copied from the caller's trace context. For a trace that begins here it is
    0, because the sampling decision is made at the end of the request.
    """
    flags = _IS_SAMPLED if trace.is_parent_sampled else 0
    return f"00-{trace.trace_id.hex()}-{trace.span_id.hex()}-{flags:02x}"


def trace_metadata(trace: TraceParent) -> tuple[tuple[str, str], ...]:
    """Return response metadata by which the caller can find the trace: the trace id and the
    `traceresponse` header. Empty if the request is not traced."""
    if not trace.trace_id:
        return ()
    return (
        (TRACE_ID_KEY, trace.trace_id.hex()),
        (TRACERESPONSE_KEY, trace_response(trace)),
    )


class TraceIds:
    """Generates random ids that are never zero: 128 bits for a trace, 64 bits for a span.

    The ids are taken from a pool of bytes from the system's random generator. A forked process
    fills a new pool.
    """

    __slots__ = ("__weakref__", "_pool", "_position")

    def __init__(self) -> None:
        self._pool = b""
        self._position = _POOL_BYTES
        _all_ids.add(self)

    def discard_pool(self) -> None:
        """Discard the pool of random bytes. Called in a forked process, because it would otherwise
        generate the same ids as its parent."""
        self._position = _POOL_BYTES

    def new_trace_id(self) -> bytes:
        """Return a random trace id: 16 bytes, never all zeros."""
        while (trace_id := self._draw(16)) == _NO_TRACE_ID:
            pass
        return trace_id

    def new_span_id(self) -> bytes:
        """Return a random span id: 8 bytes, never all zeros."""
        while (span_id := self._draw(8)) == _NO_SPAN_ID:
            pass
        return span_id

    def new_trace_parent(self, parent: RemoteParent | None) -> TraceParent:
        """Return the ids of a request, as a child of `parent` or as the root of a new trace."""
        if parent is None:
            both = self._draw(24)
            trace_id, span_id = both[:16], both[16:]
            if trace_id == _NO_TRACE_ID or span_id == _NO_SPAN_ID:
                trace_id, span_id = self.new_trace_id(), self.new_span_id()
            return TraceParent(trace_id, span_id)
        return TraceParent(
            parent.trace_id,
            self.new_span_id(),
            parent.span_id,
            parent.is_sampled,
            parent.trace_state,
        )

    def _draw(self, num_bytes: int) -> bytes:
        start, end = self._position, self._position + num_bytes
        if end > _POOL_BYTES:
            self._pool = os.urandom(_POOL_BYTES)
            start, end = 0, num_bytes
        self._position = end
        return self._pool[start:end]


_all_ids: "weakref.WeakSet[TraceIds]" = weakref.WeakSet()


def _discard_pools() -> None:
    for ids in _all_ids:
        ids.discard_pool()


# A fork copies the pool. Checking the process id for each id would cost more than creating it.
os.register_at_fork(after_in_child=_discard_pools)


def _text_of(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _bounded(trace_state: str) -> str:
    """Return at most MAX_TRACE_STATE_CHARS characters of a trace state, without a truncated member.

    Keeps the newest members; they come first. Returns "" if the trace state is not printable ASCII.
    """
    if not _TRACE_STATE.fullmatch(trace_state[: 4 * MAX_TRACE_STATE_CHARS]):
        return ""
    if len(trace_state) <= MAX_TRACE_STATE_CHARS:
        return trace_state
    kept, comma, _ = trace_state[: MAX_TRACE_STATE_CHARS + 1].rpartition(",")
    return kept if comma else ""
