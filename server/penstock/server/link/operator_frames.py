"""The frames by which operators query and control a running process.

Commands go to engines and fronts alike.
"""

import enum

from penstock.scheduler.live_view import LiveView
from penstock.server.link.wire import TaggedFrame


class CommandKind(enum.IntEnum):
    """The commands that a process supports."""

    LOG_LEVEL = 1
    """Set the log level; the argument is its name."""
    PROFILE = 2
    """Sample the threads for the seconds of the argument; the payload is a speedscope
    file.
    """


class ViewQuery(TaggedFrame, frozen=True, kw_only=True):
    """Query of the live requests. `ticket` (32 bits) comes back in the answer."""

    ticket: int


class ViewAnswer(TaggedFrame, frozen=True, kw_only=True):
    """Every output that has not ended, as the engine sees it."""

    ticket: int
    views: tuple[LiveView, ...]


class Command(TaggedFrame, frozen=True, kw_only=True):
    """`ticket` (32 bits) comes back in the answer."""

    ticket: int
    kind: CommandKind
    argument: str


class CommandResult(TaggedFrame, frozen=True, kw_only=True):
    """`problem`: why it failed, empty when it succeeded; `payload`: its output."""

    ticket: int
    problem: str = ""
    payload: bytes = b""
