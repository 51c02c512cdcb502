"""Connects to other processes by Unix sockets on asyncio. Decodes the received frames, reconnects,
and matches responses to pending calls.

Frames are not interpreted here. The engine has no event loop; its connections are in
`front_connections.py`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar, cast

from penstock.server.ipc.wire import MAX_FRAME_BYTES, FrameBuffer, FrameError

logger = logging.getLogger(__name__)

FrameT = TypeVar("FrameT")
T = TypeVar("T")


class Connection(asyncio.Protocol, Generic[FrameT]):
    """One connection to a peer process. It is not reopened after it closes. `name` is the name of
    the peer for logs.

    `decode` decodes the body of a frame and `on_frame` receives the result. If either raises
    FrameError, the connection is closed. `on_open` and `on_closed` are each called once. A peer
    that does not read is disconnected when more than `max_unsent_bytes` are unsent. With
    `on_writable`, at most one frame is buffered here: the caller writes only while `is_writable`,
    and again when `on_writable` is called.
    """

    def __init__(
        self,
        name: str,
        decode: Callable[[bytes], FrameT],
        *,
        on_frame: "Callable[[Connection[FrameT], FrameT], None]",
        on_open: "Callable[[Connection[FrameT]], None] | None" = None,
        on_closed: "Callable[[Connection[FrameT]], None] | None" = None,
        on_writable: Callable[[], None] | None = None,
        max_unsent_bytes: int = MAX_FRAME_BYTES,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self.is_established = False
        """The owner sets this when it has accepted the peer. A `PersistentConnection` then resets
        its pause between attempts to the shortest one."""
        self.is_broken = False
        """True if the peer has violated the protocol."""
        self.closed = asyncio.Event()
        self._decode = decode
        self._on_frame = on_frame
        self._on_open = on_open
        self._on_closed = on_closed
        self._on_writable = on_writable
        self._max_unsent_bytes = max_unsent_bytes
        self._frames = FrameBuffer(max_frame_bytes)
        self._is_paused = False
        self._transport: asyncio.Transport | None = None

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes that the kernel has not accepted yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_writable(self) -> bool:
        """True if the kernel accepts more bytes; False after a loss, when `write` discards all
        frames."""
        return not self._is_paused and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """True unless the connection is open."""
        return self._transport is None or self._transport.is_closing()

    @property
    def has_unsent(self) -> bool:
        """True if a frame is partly sent, or was partly sent when the connection was lost (only
        with `on_writable`)."""
        return self._is_paused

    def write(self, frame: bytes) -> bool:
        """Send one frame. If too many bytes are unsent, closes the connection and returns False. If
        the connection is not open, discards the frame and returns True."""
        if self._transport is None:
            return True
        if self.num_unsent_bytes > self._max_unsent_bytes:
            logger.error("%s does not read: closing the connection", self.name)
            self.abort()
            return False
        self._transport.write(frame)
        return True

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket is open."""
        # uvloop's transports are not instances of asyncio's class, but have its interface.
        self._transport = cast(asyncio.Transport, transport)
        if self._on_writable is not None:
            self._transport.set_write_buffer_limits(0)
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received bytes."""
        try:
            for body in self._frames.feed(data):
                self._on_frame(self, self._decode(body))
        except FrameError as error:
            logger.warning("%s violated the protocol: %s", self.name, error)
            self.is_broken = True
            self.abort()

    def pause_writing(self) -> None:
        """Called by asyncio when its write buffer is full; with `on_writable`, when it is not
        empty."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Called by asyncio when its write buffer has space again; with `on_writable`, when it is
        empty."""
        self._is_paused = False
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's name)
        """Called by asyncio when the socket is closed, for any reason."""
        self._transport = None
        if self._on_closed is not None:
            self._on_closed(self)
        self.closed.set()


class PersistentConnection(Generic[FrameT]):
    """Keeps a connection to the socket at `path`, from `start` to `close`; reconnects after a loss.

    `connect` creates each connection. `on_open` and `on_closed` are called with each connection,
    when it is open and when it has closed. `pauses_s` are the shortest and the longest pause
    between attempts, in seconds. `on_absent` is called after each failed attempt, for example if no
    process listens at `path`. `current` is the open connection; None if there is none.
    """

    def __init__(
        self,
        path: Path,
        connect: Callable[..., Connection[FrameT]],
        *,
        on_open: Callable[[Connection[FrameT]], object],
        on_closed: Callable[[Connection[FrameT]], object],
        pauses_s: tuple[float, float],
        on_absent: Callable[[], None] = lambda: None,
    ) -> None:
        self.current: Connection[FrameT] | None = None
        self._path = path
        self._connect = connect
        self._on_open = on_open
        self._on_closed = on_closed
        self._pauses_s = pauses_s
        self._on_absent = on_absent
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start connecting, on the running event loop. Does not wait for the peer. Raises
        RuntimeError if it was started before."""
        if self._task is not None:
            raise RuntimeError("the connection was started before")
        self._task = asyncio.create_task(self._keep_open(), name=f"connection to {self._path.name}")

    async def close(self) -> None:
        """Close permanently. Returns after `on_closed` has returned, if a connection was open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        connection = self.current
        if connection is not None:
            connection.abort()
            await connection.closed.wait()

    async def _keep_open(self) -> None:
        loop = asyncio.get_running_loop()
        shortest_s, longest_s = self._pauses_s
        pause_s = shortest_s
        while True:
            try:
                _transport, made = await loop.create_unix_connection(self._new, str(self._path))
            except OSError as error:
                logger.debug("cannot connect to %s: %s", self._path, error)
                self._on_absent()
            else:
                await made.closed.wait()
                if made.is_established:
                    pause_s = shortest_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _new(self) -> Connection[FrameT]:
        return self._connect(on_open=self._opened, on_closed=self._lost)

    def _opened(self, connection: Connection[FrameT]) -> None:
        self.current = connection
        self._on_open(connection)

    def _lost(self, connection: Connection[FrameT]) -> None:
        self.current = None
        self._on_closed(connection)


class PendingCalls(Generic[T]):
    """The pending calls of one kind, each identified by its ticket (a number). All methods must be
    called on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[asyncio.Future[T], Callable[[T], None] | None]] = {}
        self._tickets = itertools.count()

    def add(self, on_answer: Callable[[T], None] | None = None) -> tuple[int, asyncio.Future[T]]:
        """Register a call; return its ticket and the future of its response.

        `on_answer` is called with the response before `resolve` returns, and so before any later
        frame is handled. If it raises, the call fails with its error.
        """
        ticket = next(self._tickets)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = answer, on_answer
        answer.add_done_callback(lambda _: self._calls.pop(ticket, None))
        return ticket, answer

    async def call(
        self, send: Callable[[int], object], on_answer: Callable[[T], None] | None = None
    ) -> T:
        """Register a call (see `add`), call `send` with its ticket, and return the response. Raises
        the error of `send`, `on_answer` or `fail`."""
        ticket, answer = self.add(on_answer)
        try:
            send(ticket)
            return await answer
        finally:
            answer.cancel()

    def resolve(self, ticket: int, value: T) -> None:
        """Resolve a call with its response. Does nothing if the call is no longer pending."""
        answer, on_answer = self._calls.get(ticket, (None, None))
        if answer is None or answer.done():
            return
        try:
            if on_answer is not None:
                on_answer(value)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def fail(self, error: Exception) -> None:
        """Fail all pending calls with `error`."""
        for answer, _ in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(error)
