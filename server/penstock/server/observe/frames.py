"""Frames between a front and the observer process.

Owns the frame types. Records are bytes, so that an unreadable one does not affect others. Does not
know sockets.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.server.link.frames import Command, CommandResult
from penstock.server.link.wire import Codec, TaggedFrame
from penstock.server.observe.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontView:
    """A request that has not been released.

    `keys`: the engine's keys of its outputs; empty while it is prepared. `phase`: the value of a
    `SegmentKind`; `history`: every phase with its start time, oldest first. `trace_id`: 32
    hexadecimal digits. `num_backlog_tokens`: output that its client has not read.
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
    """A front's first frame. `front_id` is unique to this process of the front."""

    front_id: int
    pid: int


class Records(TaggedFrame, frozen=True, kw_only=True):
    """Requests that have ended, oldest first, encoded by `encode_record`."""

    payloads: tuple[bytes, ...]


class LiveQuery(TaggedFrame, frozen=True, kw_only=True):
    """Query for live requests. The answer has the same `ticket` (32 bits)."""

    ticket: int


class LiveAnswer(TaggedFrame, frozen=True, kw_only=True):
    """Requests of a front that have not been released; all of them with the `is_last` answer."""

    ticket: int
    views: tuple[FrontView, ...]
    is_last: bool = True


ObserverFrame: TypeAlias = (
    Hello | Records | Heartbeat | LiveQuery | LiveAnswer | Command | CommandResult
)

_CODEC: Codec[ObserverFrame] = Codec(ObserverFrame)
encode = _CODEC.encode
decode = _CODEC.decode
