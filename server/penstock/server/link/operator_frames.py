"""The frames by which a running process is looked into: its live requests, and orders to it.

Owns the frames. Orders go to engines and fronts alike. Does not know who carries them
out.
"""

import enum

from penstock.scheduler.live_view import LiveView
from penstock.server.link.wire import TaggedFrame


class CommandKind(enum.IntEnum):
    """What a process can be told to do besides its work."""

    LOG_LEVEL = 1
    """Log what is at least as grave as the argument, the name of a level."""
    PROFILE = 2
    """Sample its threads for as many seconds as the argument says; the answer is a speedscope
    file."""


class ViewQuery(TaggedFrame, frozen=True, kw_only=True):
    """Which requests live? `ticket` (32 bits) comes back in the answer."""

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
    """`problem`: why it could not be done, empty when it was; `payload`: what came of it."""

    ticket: int
    problem: str = ""
    payload: bytes = b""
