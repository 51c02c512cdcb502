"""The frames between the supervisor and a child process. Their connection is also the child's
lifeline.
"""

from typing import TypeAlias

from penstock.server.link.wire import Codec, TaggedFrame


class Launch(TaggedFrame, frozen=True, kw_only=True):
    """The first frame to a child: its encoded settings."""

    settings: bytes


class Stop(TaggedFrame, frozen=True, kw_only=True):
    """Drain and stop. `grace_s` overrides the configured grace period, unless None.

    `is_hand_over`: a successor already serves.
    """

    grace_s: float | None = None
    is_hand_over: bool = False


class EngineLost(TaggedFrame, frozen=True, kw_only=True):
    """Sent to a front: no further engine will start."""


class Ready(TaggedFrame, frozen=True, kw_only=True):
    """The child serves. `facts`: its startup report, for logs."""

    facts: dict[str, str | int | float | None]


class StartFailed(TaggedFrame, frozen=True, kw_only=True):
    """The child cannot start. `message`: the reason, for the operator."""

    message: str


class StopReceived(TaggedFrame, frozen=True, kw_only=True):
    """The child has received `Stop`."""


class Drain(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command to drain the service, within `timeout_s` or the configured time."""

    timeout_s: float | None


class LogLevel(TaggedFrame, frozen=True, kw_only=True):
    """An operator's log level for processes that start later."""

    level: str


ToChild: TypeAlias = Launch | Stop | EngineLost
FromChild: TypeAlias = Ready | StartFailed | StopReceived | Drain | LogLevel

TO_CHILD: Codec[ToChild] = Codec(ToChild)
FROM_CHILD: Codec[FromChild] = Codec(FromChild)
