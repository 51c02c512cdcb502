"""The two interfaces between a front and an engine.

Owns the protocols and the hello. A front calls an `EnginePort` and listens as an `EngineListener`;
neither knows whether the engine is in this process (tests) or behind a Unix socket. All calls
happen on the front's event loop.
"""

from typing import Protocol

from penstock.scheduler.events import StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.wire import TaggedFrame


class EngineHello(TaggedFrame, frozen=True, kw_only=True):
    """An engine's first frame on every connection.

    `epoch` grows with every engine start. `max_num_waiting` and `max_num_waiting_tokens` bound its
    queue. `publishes_cache`: fronts may subscribe to its cached blocks.
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
        """Bytes that wait here until the engine reads them."""
        ...

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Submit the outputs of one request, leader first.

        A refusal (queue full, id in use, too large) comes back as one `Failed` end per spec. Raises
        `EngineUnavailable` when the engine is down.
        """
        ...

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """Cancel requests, with `reason`; a `Finished` event follows for each live one.

        Idempotent; unknown keys are ignored. A no-op when the engine is down.
        """
        ...

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """Cancel a live request of any front by its id.

        Returns its state, None when there is none. The front that owns it gets `Finished` with
        CANCELLED. Raises `EngineUnavailable`.
        """
        ...


class EngineListener(Protocol):
    """A front as the engine sees it. Must not block; must not raise."""

    def on_hello(self, hello: EngineHello) -> None:
        """An engine has connected. It knows no request of an earlier engine."""
        ...

    def on_events(self, events: StepEvents) -> None:
        """One step's events, only of this front's keys."""
        ...

    def on_lost(self) -> None:
        """The engine died or disconnected: all its requests are lost."""
        ...


class EngineUnavailable(Exception):
    """No engine is connected."""
