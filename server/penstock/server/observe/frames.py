"""Frames between a front (gRPC server process) and the observer process.

Counters in a heartbeat are cumulative, so a lost heartbeat loses no counts. Records are bytes, so
that an unreadable record does not affect others.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.server.ipc.frames import Command, CommandResult
from penstock.server.ipc.wire import Codec, TaggedFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCount:
    """The number `num` of ended requests that have the same method, status code, error reason and
    finish reason.

    The other fields are as in `RequestRecord`. `finish_reason` is the finish reason of the first
    output, empty if there is none.
    """

    method: str
    code: int
    reason: str
    finish_reason: str
    num: int


class Heartbeat(TaggedFrame, frozen=True, kw_only=True):
    """The state of a front.

    Counts that are not listed below are totals since the start of the front; they are described in
    `metrics/catalogue.py`.

    Attributes:
        epoch: The number of the engine start, from 1, in the last `EngineHello` that the front
            received; 0 before the first.
        num_streams: Number of open calls.
        num_live: Number of requests that the front has not removed yet.
        num_backlog_tokens: Number of output tokens that have not been sent to the clients yet.
        loop_lag_s: The event-loop lags measured since the last heartbeat, in seconds (see
            `front_reporter.py`).
        queue_estimate_s: The predicted wait of the most recently queued request of this front, in
            seconds; None if it was not predicted.
        queue_estimate_at_s: Time of this prediction on the monotonic clock.
        dropped_records: The total number of records that were not delivered, by reason.
    """

    front_id: int
    pid: int
    epoch: int
    is_draining: bool
    is_engine_up: bool
    num_streams: int
    num_live: int
    num_backlog_tokens: int
    num_submitted: int
    num_disconnected_readers: int
    num_late_events: int
    num_unknown_fields: int
    num_internal_errors: int
    num_records: int
    num_lowered_priorities: int = 0
    dropped_records: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    outcomes: tuple[OutcomeCount, ...] = ()
    loop_lag_s: tuple[float, ...] = ()
    queue_estimate_s: float | None = None
    queue_estimate_at_s: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRequestView:
    """A request that a front has not removed yet, as the front sees it. Times are seconds on the
    monotonic clock.

    `keys` identify the outputs of the request in the engine. `history` has the name (a value of
    `SegmentKind`) and the start time of each phase so far.
    """

    front_id: int
    keys: tuple[int, ...]
    request_id: str
    tenant: str
    priority: int
    trace_id: str
    arrival_s: float
    phase: str
    history: tuple[tuple[str, float], ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_backlog_tokens: int


class Hello(TaggedFrame, frozen=True, kw_only=True):
    """The first frame from a front. `front_id` identifies this front process; a restarted front has
    another id."""

    front_id: int
    pid: int


class Records(TaggedFrame, frozen=True, kw_only=True):
    """Records of ended requests, the oldest first, each encoded by `encode_record`."""

    payloads: tuple[bytes, ...]


class LiveQuery(TaggedFrame, frozen=True, kw_only=True):
    """A query for live requests. The response has the same `ticket`."""

    ticket: int


class LiveAnswer(TaggedFrame, frozen=True, kw_only=True):
    """One part of the response to a `LiveQuery`: some of the live requests of a front. `is_last` is
    True in the last part."""

    ticket: int
    views: tuple[FrontRequestView, ...]
    is_last: bool = True


ObserverFrame: TypeAlias = (
    Hello | Records | Heartbeat | LiveQuery | LiveAnswer | Command | CommandResult
)

_CODEC: Codec[ObserverFrame] = Codec(ObserverFrame)
encode = _CODEC.encode
decode = _CODEC.decode
