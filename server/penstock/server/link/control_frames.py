"""The frames between the supervisor and a child process, on the line that is also its lifeline.

Owns which kinds there are, in either direction. Does not know who acts on them.
"""

from typing import TypeAlias

from penstock.server.link.wire import Codec, TaggedFrame


class Launch(TaggedFrame, frozen=True, kw_only=True):
    """What a child is told first: its encoded settings."""

    settings: bytes


class Stop(TaggedFrame, frozen=True, kw_only=True):
    """Finish. `grace_s`: in place of the one of the settings, None for that.

    `is_hand_over`: another has taken its place already.
    """

    grace_s: float | None = None
    is_hand_over: bool = False


class EngineLost(TaggedFrame, frozen=True, kw_only=True):
    """For a front: no engine will come any more."""


class Ready(TaggedFrame, frozen=True, kw_only=True):
    """The child serves. `facts`: of it, for logs."""

    facts: dict[str, str | int | float | None]


class StartFailed(TaggedFrame, frozen=True, kw_only=True):
    """The child cannot start. `message`: why, in words for its operator."""

    message: str


class StopHeard(TaggedFrame, frozen=True, kw_only=True):
    """The child has got the order to finish."""


class Drain(TaggedFrame, frozen=True, kw_only=True):
    """An operator wants the service to drain, in `timeout_s` or the time of its settings."""

    timeout_s: float | None


class LogLevel(TaggedFrame, frozen=True, kw_only=True):
    """An operator wants processes that start later to log from `level` on."""

    level: str


ToChild: TypeAlias = Launch | Stop | EngineLost
FromChild: TypeAlias = Ready | StartFailed | StopHeard | Drain | LogLevel

TO_CHILD: Codec[ToChild] = Codec(ToChild)
FROM_CHILD: Codec[FromChild] = Codec(FromChild)
