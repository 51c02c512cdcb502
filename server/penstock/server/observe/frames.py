"""The frames between a front and the observer process, with the live requests of a front.

Owns which kinds there are. Records pass as bytes, so that one that cannot be read is lost alone.
Does not know sockets.
"""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.server.link.operator_frames import Command, CommandResult
from penstock.server.link.wire import Codec, TaggedFrame
from penstock.server.observe.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontView:
    """A request that has not been released.

    `keys`: of its outputs, as the engine knows them; empty while it is prepared. `phase`: the value
    of a `SegmentKind`; `history`: every phase it entered, with the time, oldest first.
    `trace_id`: 32 hexadecimal digits. `num_backlog_tokens`: output its reader has not taken.
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
    """What a front says first. `front_id` is of this one life of it."""

    front_id: int
    pid: int


class Records(TaggedFrame, frozen=True, kw_only=True):
    """Requests that have ended, oldest first: what `encode_record` made of each."""

    payloads: tuple[bytes, ...]


class LiveQuery(TaggedFrame, frozen=True, kw_only=True):
    """Which requests live? `ticket` (32 bits) comes back in the answer."""

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
