"""The frames between a front and the observer process.

Owns which kinds there are. Records pass as bytes, so that one that cannot be read is lost alone.
Does not know sockets.
"""

from typing import TypeAlias

from penstock.server.link.operator_frames import Command, CommandResult
from penstock.server.link.wire import Codec, TaggedFrame
from penstock.server.telemetry.beat import Beat
from penstock.server.telemetry.front_view import FrontView


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


ObserverFrame: TypeAlias = Hello | Records | Beat | LiveQuery | LiveAnswer | Command | CommandResult

_CODEC: Codec[ObserverFrame] = Codec(ObserverFrame)
encode = _CODEC.encode
decode = _CODEC.decode
