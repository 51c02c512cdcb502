"""The two interfaces between a front (gRPC server process) and the engine.

A front calls an `EnginePort` and implements `EnginePortListener`. The engine may run in this
process (in tests) or behind a Unix socket. All calls happen on the event loop of the front.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.ipc.frames import (
    Attached,
    CacheUpdate,
    EngineHello,
    KeptRequest,
)

AttachListener: TypeAlias = Callable[[Attached], None]
CacheListener: TypeAlias = Callable[[CacheUpdate | None], None]
"""Called with each update, and with None when the engine and its cache are lost. Must not raise."""


class EnginePort(Protocol):
    """The interface of the engine for a front. Methods that are not coroutines do not block."""

    @property
    def is_up(self) -> bool:
        """True while an engine is connected: from its first frame (hello) until the loss of the
        connection."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes for the engine that are buffered in this process."""
        ...

    def submit(self, specs: tuple[RequestSpec, ...], kept: KeptRequest | None = None) -> None:
        """Submit the outputs of one request, in order.

        With `kept`, the engine keeps the stream for Resume, and the request continues when the
        client's call ends; if `specs` is empty, the request has ended, and its stream is only kept.
        A rejection (queue full, id in use, too large) arrives as one `Failed` event per output.
        Raises `EngineUnavailable` when no engine is connected.
        """
        ...

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """Cancel outputs with `reason`. A `Completed` event follows for each live output.

        Idempotent. Unknown keys are ignored. Does nothing when no engine is connected.
        """
        ...

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """Cancel a request of any front by its id in the engine, see `engine_request_id`.

        Returns the state of the request when it was cancelled; its final state if it had ended and
        the engine keeps its stream; None if the engine does not have it. Its front receives
        `Completed` with CANCELLED for each live output. Raises `EngineUnavailable` if no engine is
        connected, or if the connection is lost.
        """
        ...

    async def wait_up(self) -> None:
        """Wait until an engine is connected."""
        ...

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """Attach to this front the stream of the request whose id in the engine is `name`.

        `on_attached` is called with the response, before any later event. Raises
        `EngineUnavailable` if no engine is connected, or if the connection is lost.
        """
        ...

    def detach(self, names: tuple[str, ...]) -> None:
        """Report that no client at this front reads the streams of these requests any more. `names`
        are the ids of the requests in the engine. Does nothing when no engine is connected."""
        ...

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Subscribe `listener` to the cached blocks whose hash chains begin with `salt`. All
        requests with the same tenant, adapter and client salt have the same `salt`.

        Returns a function that unsubscribes it. The first updates are a snapshot. There are no
        updates until an engine that publishes its cache (`EngineHello.publishes_cache`) is
        connected.
        """
        ...


class EnginePortListener(Protocol):
    """The interface through which a front receives the events of an engine. Its methods must not
    block or raise."""

    def on_hello(self, hello: EngineHello) -> None:
        """Called with the first frame on each new connection, to the same engine or to another
        engine."""
        ...

    def on_events(self, events: StepEvents) -> None:
        """Called with the events of one step that concern requests of this front."""
        ...

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Called when another front has taken over the stream of a request, or the engine has
        dropped it. `name` is the engine's id of the request, `keys` are the keys of its outputs."""
        ...

    def on_lost(self) -> None:
        """Called when the connection to the engine is lost."""
        ...


class EngineUnavailable(Exception):
    """No engine is connected."""
