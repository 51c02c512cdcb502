"""Connects a front (gRPC server process) to the engine over a Unix socket, on asyncio.

When the connection is lost, the port notifies its listener once and reconnects. It rejects an
engine with a lower epoch than the last one, because the supervisor has replaced that engine and its
requests run elsewhere. Requests are not interpreted here.

Frames of one iteration of the event loop are sent together. One system call per request would add
about 3 % to the CPU time of the request in this process, and would wake the engine each time.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.ipc.attach_calls import AttachCalls
from penstock.server.ipc.cache_feeds import CacheSubscriber
from penstock.server.ipc.connection import Connection, PendingCalls, PersistentConnection
from penstock.server.ipc.frames import (
    Attached,
    CacheUpdate,
    CancelAnswer,
    CancelById,
    Detach,
    EngineHello,
    Frame,
    FrontHello,
    KeptRequest,
    Submit,
    cancel_frame,
    decode,
    encode,
)
from penstock.server.ipc.ports import (
    AttachListener,
    CacheListener,
    EnginePortListener,
    EngineUnavailable,
)
from penstock.server.ipc.wire import FrameError

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 * 1024 * 1024
_MAX_GATHERED_BYTES = 32 * 1024
"""Buffered frames are sent at once when they exceed this size."""
_PAUSES_S = (0.02, 0.5)


class UnixEnginePort:
    """An `EnginePort` over a Unix socket. All calls happen on the event loop that called
    `start`."""

    def __init__(self, path: Path, front_id: int) -> None:
        self._front_id = front_id
        self._listener: EnginePortListener | None = None
        self._connection: PersistentConnection[Frame] = PersistentConnection(
            path,
            partial(
                Connection,
                "the engine",
                decode,
                on_frame=self._on_frame,
                max_unsent_bytes=_MAX_UNSENT_BYTES,
            ),
            on_open=lambda opened: opened.write(encode(FrontHello(front_id=self._front_id))),
            on_closed=self._on_closed,
            pauses_s=_PAUSES_S,
        )
        self._up = asyncio.Event()
        self._cancels: PendingCalls[RequestState | None] = PendingCalls()
        self._attach_calls = AttachCalls(lambda frame: self._write(encode(frame)))
        self._cache = CacheSubscriber(lambda frame: self._write(encode(frame)))
        self._newest_epoch = 0
        self._is_closing = False
        # Frames for the open connection, sent in the next iteration of the loop at the latest.
        self._unsent = bytearray()

    @property
    def is_up(self) -> bool:
        """True while an engine is connected: from its first frame (hello) until the loss of the
        connection."""
        return self._up.is_set()

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes for the engine that are buffered in this process."""
        connection = self._connection.current
        if connection is None:
            return 0
        return connection.num_unsent_bytes + len(self._unsent)

    async def start(self, listener: EnginePortListener) -> None:
        """Start connecting, and reconnect after each loss until `close`. Does not wait for the
        engine."""
        self._connection.start()
        self._listener = listener

    async def wait_up(self) -> None:
        """Wait until an engine is connected."""
        await self._up.wait()

    async def close(self) -> None:
        """Send the buffered frames and close permanently; `on_lost` is called if an engine was
        connected."""
        self._is_closing = True
        self._flush()
        await self._connection.close()

    def submit(self, specs: tuple[RequestSpec, ...], kept: KeptRequest | None = None) -> None:
        """Submit one request, with one spec per output (see `EnginePort.submit`). Raises
        EngineUnavailable if no engine is connected."""
        self._write(encode(Submit(specs=specs, kept=kept)))

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """Cancel the outputs with these keys. Does nothing when no engine is connected."""
        if self.is_up and keys:
            # The connection is being lost, and the request is lost with it.
            with contextlib.suppress(EngineUnavailable):
                self._write(cancel_frame(keys, reason))

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """Cancel a request of any front by its id in the engine, and return its state as
        `EnginePort.cancel_by_id` does.

        Raises EngineUnavailable if no engine is connected, or if the connection is lost.
        """
        return await self._cancels.call(
            lambda ticket: self._write(encode(CancelById(ticket=ticket, request_id=request_id)))
        )

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """Attach the stream of a request to this front; `on_attached` receives the response.

        Raises EngineUnavailable if no engine is connected, or if the connection is lost.
        """
        await self._attach_calls.attach(name, on_attached)

    def detach(self, names: tuple[str, ...]) -> None:
        """Report that no client at this front reads the streams of these requests any more. `names`
        are the engine's ids of the requests. Does nothing when no engine is connected."""
        # The streams of a lost engine are lost with it.
        with contextlib.suppress(EngineUnavailable):
            self._write(encode(Detach(names=names)))

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """Subscribe `listener` to the cached blocks whose hash chains begin with `salt`.

        Returns a function that unsubscribes it.
        """
        return self._cache.follow(salt, listener)

    def _write(self, frame: bytes) -> None:
        if self._connection.current is None or not self.is_up:
            raise EngineUnavailable("the engine is down")
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += frame
        if len(self._unsent) > _MAX_GATHERED_BYTES and not self._flush():
            # An engine that does not read is considered lost; `on_lost` is called next.
            raise EngineUnavailable("the engine does not read")

    def _flush(self) -> bool:
        """Send the buffered frames. Returns False if too many bytes were unsent and the connection
        was closed."""
        frames, self._unsent = bytes(self._unsent), bytearray()
        connection = self._connection.current
        return connection is None or not frames or connection.write(frames)

    def _on_frame(self, connection: Connection[Frame], frame: Frame) -> None:
        listener = self._listener
        assert listener is not None
        match frame:
            case EngineHello() as hello:
                self._accept(connection, hello)
                listener.on_hello(hello)
                self._cache.on_hello(hello)
            case _ if not connection.is_established:
                raise FrameError("the first frame is not a hello")
            case StepEvents() as events:
                listener.on_events(events)
            case CancelAnswer(ticket=ticket, state=state):
                self._cancels.resolve(ticket, state)
            case Attached() as answer:
                self._attach_calls.pending.resolve(answer.ticket, answer)
            case Detach(names=names, keys=keys):
                for name in names:
                    listener.on_detached(name, keys)
            case CacheUpdate() as update:
                self._cache.on_update(update)
            case other:
                raise FrameError(f"unexpected frame from the engine: {type(other).__name__}")

    def _accept(self, connection: Connection[Frame], hello: EngineHello) -> None:
        if connection.is_established:
            raise FrameError("a second hello")
        if hello.epoch < self._newest_epoch:
            raise FrameError(f"an engine of epoch {hello.epoch} after one of {self._newest_epoch}")
        self._newest_epoch = hello.epoch
        connection.is_established = True
        self._up.set()

    def _on_closed(self, connection: Connection[Frame]) -> None:
        self._up.clear()
        self._unsent.clear()
        lost = EngineUnavailable("the engine was lost")
        self._attach_calls.pending.fail(lost)
        self._cancels.fail(lost)
        self._cache.on_lost()
        if connection.is_established and self._listener is not None:
            if not self._is_closing:
                logger.warning("the engine is lost")
            self._listener.on_lost()
