"""The two faces of the link between a front and an engine.

Owns the protocols and the greeting. A front talks to an `EnginePort` and listens as an
`EngineListener`; neither knows whether the engine is in this process (tests) or behind a Unix
socket. All calls happen on the front's event loop.
"""

from typing import Protocol

from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.wire import TaggedFrame


class EngineHello(TaggedFrame, frozen=True, kw_only=True):
    """What an engine says first on every connection.

    `epoch` grows with every engine start. `max_num_waiting` and `max_num_waiting_tokens` bound its
    queue. `publishes_cache`: fronts may follow what is cached.
    """

    epoch: int
    model: str
    executor: ExecutorInfo
    max_num_waiting: int
    max_num_waiting_tokens: int
    publishes_cache: bool = False


class EnginePort(Protocol):
    """The engine as a front sees it. Nothing here blocks or awaits except `cancel_by_id`."""

    @property
    def is_up(self) -> bool:
        """True between an engine's hello and its loss."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """What waits here until the engine reads it."""
        ...

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Hand over the outputs of one request, leader first.

        A refusal (queue full, id in use, too large) comes back as one `Failed` end per spec.
        Raises `EngineUnavailable` when the engine is down.
        """
        ...

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """End requests now, with `reason`; a `Finished` event follows for each that still lived.

        Idempotent; unknown keys are ignored. A no-op when the engine is down.
        """
        ...

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """Cancel a live request of any front by its id.

        Returns where it stood, None when there is none. The front that owns it sees `Finished`
        with CANCELLED. Raises `EngineUnavailable`.
        """
        ...


class EngineListener(Protocol):
    """A front as the engine sees it. Must not block; must not raise."""

    def on_hello(self, hello: EngineHello) -> None:
        """An engine is there (again). No request of an earlier engine is known to it."""
        ...

    def on_events(self, events: StepEvents) -> None:
        """One step's news, only this front's keys among them."""
        ...

    def on_lost(self) -> None:
        """The engine died or hung up: every request it had is gone."""
        ...


class EngineUnavailable(Exception):
    """There is no engine to talk to right now."""
