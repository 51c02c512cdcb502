"""The front's side of the Unix-socket link, on asyncio.

Owns one connection to the engine and its rebirth: it connects, and when the engine goes it tells
the listener once and connects again. Listens to no engine older than one it has heard: that one
was given up on, and what it has to say is of requests that live elsewhere by now. Does not know
requests beyond their frames.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.cache_desk import CacheDesk, CacheListener
from penstock.server.link.cache_frames import CacheNews
from penstock.server.link.claims import ClaimDesk, Claimed, Keeper
from penstock.server.link.dispatch import cancel_frame
from penstock.server.link.frames import CancelAnswer, CancelById, FrontHello, decode, encode
from penstock.server.link.ports import EngineHello, EngineListener, EngineUnavailable
from penstock.server.link.resume_frames import Ask, ClaimAnswer, Gone, Keep, Lack
from penstock.server.link.spec_frames import Submit
from penstock.server.link.wire import FrameBuffer, LinkError

log = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 * 1024 * 1024
_FIRST_RETRY_S = 0.02
_MAX_RETRY_S = 0.5


class UnixEnginePort:
    """An `EnginePort` over a Unix socket. Everything happens on the loop that called `start`."""

    def __init__(self, path: Path, front_id: int) -> None:
        self._path = path
        self._front_id = front_id
        self._listener: EngineListener | None = None
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._answers: dict[int, asyncio.Future[RequestState | None]] = {}
        self._next_ticket = 0
        self._claims = ClaimDesk(lambda frame: self._write(encode(frame)))
        self._cache = CacheDesk(lambda frame: self._write(encode(frame)))
        self._newest_epoch = 0
        self._is_closing = False

    @property
    def is_up(self) -> bool:
        """True between an engine's hello and its loss."""
        return self._up.is_set()

    @property
    def num_unsent_bytes(self) -> int:
        """See `EnginePort.num_unsent_bytes`."""
        return 0 if self._connection is None else self._connection.num_unsent_bytes

    async def start(self, listener: EngineListener) -> None:
        """Begin to connect, and keep connected until `close`. Does not wait for the engine."""
        if self._task is not None:
            raise RuntimeError("the port was started before")
        self._listener = listener
        self._task = asyncio.create_task(self._keep_connected(), name="engine link")

    async def wait_up(self) -> None:
        """Return when an engine has said hello."""
        await self._up.wait()

    async def close(self) -> None:
        """Hang up for good; the listener hears `on_lost` if an engine was there."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        connection = self._connection
        if connection is not None:
            connection.abort()
            await connection.closed.wait()

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EnginePort.submit`."""
        self._write(encode(Submit(specs=specs)))

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        """See `EnginePort.cancel`."""
        if self.is_up and keys:
            # An engine that cannot be told is on its way out, and with it what was to be cancelled.
            with contextlib.suppress(EngineUnavailable):
                self._write(cancel_frame(keys, reason))

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        """See `EnginePort.cancel_by_id`."""
        ticket = self._next_ticket
        self._next_ticket = (ticket + 1) % 2**32
        self._write(encode(CancelById(ticket=ticket, request_id=request_id)))
        answer: asyncio.Future[RequestState | None] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        try:
            return await answer
        finally:
            self._answers.pop(ticket, None)

    def keep(self, keep: Keep) -> None:
        """See `ClaimPort.keep`."""
        # An engine that cannot be told is on its way out, and the next one will be told.
        with contextlib.suppress(EngineUnavailable):
            self._write(encode(keep))

    async def claim(self, name: str) -> Claimed | Lack:
        """See `ClaimPort.claim`."""
        return await self._claims.claim(name)

    def on_asked(self, keeper: Keeper) -> None:
        """See `ClaimPort.on_asked`."""
        self._claims.on_asked(keeper)

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        """See `CachePort.follow_cache`."""
        return self._cache.follow(salt, listener)

    def _write(self, frame: bytes) -> None:
        connection = self._connection
        if connection is None or not self.is_up:
            raise EngineUnavailable("the engine is down")
        if connection.num_unsent_bytes > _MAX_UNSENT_BYTES:
            # An engine that takes nothing is as good as lost, and is told so: `on_lost` follows.
            log.error("the engine does not read: hanging up")
            connection.abort()
            raise EngineUnavailable("the engine does not read")
        connection.write(frame)

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = _FIRST_RETRY_S
        while True:
            connection = _Connection(self._on_frame, self._on_closed)
            try:
                await loop.create_unix_connection(connection.itself, str(self._path))
            except OSError as error:
                log.debug("no engine at %s: %s", self._path, error)
            else:
                self._connection = connection
                connection.write(encode(FrontHello(front_id=self._front_id)))
                await connection.closed.wait()
                if connection.was_greeted:
                    retry_s = _FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _on_frame(self, connection: "_Connection", kind: int, body: bytes) -> None:
        listener = self._listener
        assert listener is not None
        match decode(kind, body):
            case EngineHello() as hello:
                if connection.was_greeted:
                    raise LinkError("a second hello")
                if hello.epoch < self._newest_epoch:
                    raise LinkError(
                        f"an engine of epoch {hello.epoch} after one of {self._newest_epoch}"
                    )
                self._newest_epoch = hello.epoch
                connection.was_greeted = True
                self._up.set()
                listener.on_hello(hello)
                self._cache.greet(hello)
            case _ if not connection.was_greeted:
                raise LinkError("the first frame is no hello")
            case StepEvents() as events:
                listener.on_events(events)
            case CancelAnswer(ticket=ticket, state=state):
                answer = self._answers.get(ticket)
                if answer is not None and not answer.done():
                    answer.set_result(state)
            case Ask() | ClaimAnswer() | Gone() as frame:
                self._claims.hear(frame)
            case CacheNews() as news:
                self._cache.hear(news)
            case other:
                raise LinkError(f"an engine does not send {type(other).__name__}")

    def _on_closed(self, connection: "_Connection") -> None:
        self._connection = None
        self._up.clear()
        self._claims.lose()
        self._cache.lose()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine went away"))
        if connection.was_greeted and self._listener is not None:
            if not self._is_closing:
                log.warning("the engine is gone")
            self._listener.on_lost()


class _Connection(asyncio.Protocol):
    """One life of the socket: bytes to frames and back."""

    def __init__(
        self,
        on_frame: "Callable[[_Connection, int, bytes], None]",
        on_closed: "Callable[[_Connection], None]",
    ) -> None:
        self.closed = asyncio.Event()
        self.was_greeted = False
        self._frames = FrameBuffer()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None

    @property
    def num_unsent_bytes(self) -> int:
        """What the engine has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def itself(self) -> "_Connection":
        """The protocol factory that asyncio asks for."""
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is there."""
        # uvloop's transports are no instances of asyncio's class, only like it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            for kind, body in self._frames.feed(data):
                self._on_frame(self, kind, body)
        except LinkError:
            log.exception("the engine broke the protocol")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's name)
        """asyncio: the socket is gone, for whatever reason."""
        self._transport = None
        self._on_closed(self)
        self.closed.set()

    def write(self, frame: bytes) -> None:
        """Send one frame."""
        if self._transport is not None:
            self._transport.write(frame)

    def abort(self) -> None:
        """Hang up now."""
        if self._transport is not None:
            self._transport.abort()
