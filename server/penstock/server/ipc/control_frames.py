"""The frames between the supervisor and a child process.

A child process ends when its connection to the supervisor closes.
"""

from typing import TypeAlias

from penstock.server.ipc.wire import Codec, TaggedFrame


class Launch(TaggedFrame, frozen=True, kw_only=True):
    """The first frame that a child process receives: its encoded launch parameters."""

    settings: bytes


class Stop(TaggedFrame, frozen=True, kw_only=True):
    """The supervisor's command to drain and stop within `drain_timeout_s` seconds. None means the
    configured time.

    `has_successor` is True if a successor is already serving.
    """

    drain_timeout_s: float | None = None
    has_successor: bool = False


class EngineLost(TaggedFrame, frozen=True, kw_only=True):
    """Notifies a front (gRPC server process) that no further engine will be started."""


class Ready(TaggedFrame, frozen=True, kw_only=True):
    """The child process is serving. `facts` is its startup report: the supervisor logs it, and the
    ready line of `penstock serve` contains the `resources` of the engine's report."""

    facts: dict[str, str | int | float | None]


class StartFailed(TaggedFrame, frozen=True, kw_only=True):
    """The child process cannot start. `message` is the reason, for the operator."""

    message: str


class StopReceived(TaggedFrame, frozen=True, kw_only=True):
    """The child process has received `Stop`."""


class Drain(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command to drain the service within `timeout_s` seconds; None means the
    configured drain timeout."""

    timeout_s: float | None


class SetLogLevel(TaggedFrame, frozen=True, kw_only=True):
    """An operator's command to set the log level of the process that receives it. The supervisor
    also passes the level to processes that it starts later."""

    level: str


ToChild: TypeAlias = Launch | Stop | EngineLost
FromChild: TypeAlias = Ready | StartFailed | StopReceived | Drain | SetLogLevel

TO_CHILD: Codec[ToChild] = Codec(ToChild)
FROM_CHILD: Codec[FromChild] = Codec(FromChild)
