"""The engine's connections to its fronts (gRPC server processes) over Unix sockets, on one thread
without asyncio.

Owns the connections and their output buffers. Disconnects a front that does not read, so that its
output buffer stays bounded; its requests, except resumable ones, are then cancelled. Observers also
connect here. `dispatch.py` interprets the frames.
"""

import functools
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.server.engine.dispatch import Dispatcher
from penstock.server.ipc.frames import Frame, FrontHello, ObserverHello, decode
from penstock.server.ipc.wire import FrameBuffer, FrameError

logger = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""A front or observer is disconnected when its output buffer exceeds this size."""
_RECEIVE_BYTES = 256 * 1024
_MAX_ACCEPTS_PER_POLL = 64
_LEAST_HANDLING_S = 0.005
"""Minimum of the time limit for handling frames before the next step, in seconds. The limit is
`_HANDLING_SHARE` of the time since the last poll if that is longer. Without a limit, 256
simultaneous requests would take about 65 ms, during which the device would be idle."""
_HANDLING_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _Connection:
    """The connection to one front or observer. `front_id` is 0 for an observer, and for a front
    that has not sent its first frame, `FrontHello`.

    `received` yields the bodies of frames that are not handled yet; unless it is None, nothing more
    is read.
    """

    socket: socket.socket
    frames: FrameBuffer = field(default_factory=FrameBuffer)
    received: Iterator[bytes] | None = None
    output: bytearray = field(default_factory=bytearray)
    front_id: int = 0
    is_observer: bool = False
    # The size of each part of `output`, and the time when it was buffered.
    waiting: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])

    def put(self, rest: memoryview, now_s: float) -> None:
        """Append bytes that the socket did not accept to the output buffer."""
        self.output += rest
        self.waiting.append((len(rest), now_s))

    def remove_sent(self, num_bytes: int) -> None:
        """Remove the bytes that the socket has accepted from the start of the output buffer."""
        del self.output[:num_bytes]
        while num_bytes:
            size, since_s = self.waiting.popleft()
            if size > num_bytes:
                self.waiting.appendleft((size - num_bytes, since_s))
            num_bytes -= min(size, num_bytes)

    @property
    def blocked_since_s(self) -> float:
        """Time when the oldest buffered byte was buffered. The buffer must not be empty."""
        return self.waiting[0][1]


class FrontConnections:
    """Accepts fronts and observers on a listening socket, and exchanges frames with them.

    A process is disconnected when its output buffer exceeds `max_output_bytes`, or when a byte
    stays in that buffer for longer than `max_blocked_s`. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        dispatcher: Dispatcher,
        *,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        max_blocked_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dispatcher = dispatcher
        self._max_output_bytes = max_output_bytes
        self._max_blocked_s = max_blocked_s
        self._clock = clock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._by_front: dict[int, _Connection] = {}
        self._blocked: set[_Connection] = set()
        # Connections with frames in `received`; the one that has waited longest comes first.
        self._unhandled: dict[_Connection, None] = {}
        self._polled_s = self._until_s = clock()
        self._late_answers: deque[tuple[_Connection, bytes]] = deque()
        self._watched_fd = -1
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for own in (listener, self._wake_receiver, self._wake_sender):
            own.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    @property
    def num_fronts(self) -> int:
        """Number of connected fronts that have sent their first frame, `FrontHello`."""
        return len(self._by_front)

    def watch(self, fd: int) -> None:
        """Make `poll` return when `fd` is readable; the caller reads it."""
        self._watched_fd = fd
        self._selector.register(fd, selectors.EVENT_READ)

    def wake(self) -> None:
        """Make `poll` return, from any thread."""
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            return  # The pipe has unread bytes, which wake `poll` already.

    def poll(self, timeout_s: float | None) -> bool:
        """Accept connections, handle received frames, and send buffered output.

        Frames that would delay the next step too long are handled in the next poll. Waits up to
        `timeout_s` (None: without limit) for the first event, or until a process that does not read
        must be disconnected. Returns True if the descriptor passed to `watch` is readable.
        """
        is_watched_ready = False
        if self._blocked:
            until_stall_s = max(0.0, self._earliest_stall_s() - self._clock())
            timeout_s = until_stall_s if timeout_s is None else min(timeout_s, until_stall_s)
        most_s = max(_LEAST_HANDLING_S, _HANDLING_SHARE * (self._clock() - self._polled_s))
        ready = self._selector.select(0.0 if self._unhandled else timeout_s)
        self._until_s = self._clock() + most_s
        for connection in tuple(self._unhandled):
            self._handle_received(connection)
        for key, mask in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                self._send_late_answers()
            elif key.fileobj == self._watched_fd:
                is_watched_ready = True
            else:
                connection = key.data
                if mask & selectors.EVENT_WRITE and connection in self._connections:
                    self._flush(connection)
                if mask & selectors.EVENT_READ and connection in self._connections:
                    self._receive(connection)
        if self._blocked:
            self._drop_stalled()
        self._polled_s = self._clock()
        return is_watched_ready

    def send(self, front_id: int, frame: bytes) -> None:
        """Send the bytes that the socket accepts and buffer the others. Does nothing for a
        disconnected front."""
        connection = self._by_front.get(front_id)
        if connection is not None:
            self._send(connection, frame)

    def close(self) -> None:
        """Close all connections. The listening socket stays open, because it belongs to the
        caller."""
        for connection in self._connections:
            connection.socket.close()
        self._connections.clear()
        self._by_front.clear()
        self._blocked.clear()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_PER_POLL):
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Either no descriptors are left or the peer has disconnected: the next poll accepts
                # again.
                logger.warning("cannot accept a front: %s", error)
                return
            accepted.setblocking(False)
            connection = _Connection(accepted)
            self._connections.add(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        if connection.received is not None:
            return
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received = connection.frames.feed(data)
        self._handle_received(connection)

    def _handle_received(self, connection: _Connection) -> None:
        """Handle received frames until the time limit of this poll; the first one is always
        handled. Disconnect a process that violates the protocol."""
        self._unhandled.pop(connection, None)
        try:
            for body in connection.received or ():
                self._handle(connection, decode(body))
                if connection not in self._connections:
                    return
                if self._clock() >= self._until_s:
                    self._unhandled[connection] = None
                    return
        except FrameError as error:
            self._drop(connection, f"it violated the protocol: {error}")
        connection.received = None

    def _handle(self, connection: _Connection, frame: Frame) -> None:
        if connection.front_id:
            answer = self.dispatcher.handle_frame(connection.front_id, frame)
        elif connection.is_observer:
            late = functools.partial(self._answer_late, connection)
            self.dispatcher.handle_observer_frame(frame, late)
            answer = None
        else:
            answer = self._on_hello(connection, frame)
        if answer is not None:
            self._send(connection, answer)

    def _answer_late(self, connection: _Connection, frame: bytes) -> None:
        """Queue a frame for an observer; the next poll sends it. May be called from any thread."""
        self._late_answers.append((connection, frame))
        self.wake()

    def _send_late_answers(self) -> None:
        for _ in range(len(self._late_answers)):
            connection, frame = self._late_answers.popleft()
            if connection in self._connections:
                self._send(connection, frame)

    def _on_hello(self, connection: _Connection, hello: Frame) -> bytes:
        if isinstance(hello, ObserverHello):
            connection.is_observer = True
            return self.dispatcher.hello_frame
        if not isinstance(hello, FrontHello):
            raise FrameError("the first frame is not a hello")
        earlier = self._by_front.get(hello.front_id)
        if earlier is not None:
            # The front reconnected before the loss of its old connection was detected.
            self._drop(earlier, "it reconnected")
        connection.front_id = hello.front_id
        self._by_front[hello.front_id] = connection
        return self.dispatcher.front_connected(hello.front_id)

    def _send(self, connection: _Connection, frame: bytes) -> None:
        sent = 0
        if not connection.output:
            try:
                sent = connection.socket.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(connection)
                return
        if sent == len(frame):
            return
        if not connection.output:
            self._mark_blocked(connection)
        connection.put(memoryview(frame)[sent:], self._clock())
        if len(connection.output) > self._max_output_bytes:
            self._drop(connection, f"it left {len(connection.output)} bytes unread")

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.output)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.remove_sent(sent)
        if not connection.output:
            self._blocked.discard(connection)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _mark_blocked(self, connection: _Connection) -> None:
        self._blocked.add(connection)
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(connection.socket, both, connection)

    def _earliest_stall_s(self) -> float:
        return min(c.blocked_since_s for c in self._blocked) + self._max_blocked_s

    def _drop_stalled(self) -> None:
        limit_s = self._clock() - self._max_blocked_s
        for connection in [c for c in self._blocked if c.blocked_since_s <= limit_s]:
            self._drop(connection, f"its unread output is {self._max_blocked_s:g} s old")

    def _drop(self, connection: _Connection, fault: str = "") -> None:
        """Close a connection, and notify the dispatcher if it belongs to a front. `fault` is empty
        if the peer closed it.

        Closing by the peer is logged at debug level only, because a front drains before it closes,
        the supervisor logs the death of a process, the dispatcher logs cancelled requests, and a
        peer that sends no frame is a liveness probe.
        """
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._blocked.discard(connection)
        self._unhandled.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        name = "the observer" if connection.is_observer else "a connection without hello"
        if connection.front_id:
            name = f"front {connection.front_id}"
        if fault:
            logger.warning("%s is disconnected: %s", name, fault)
        else:
            logger.debug("%s has disconnected", name)
        if connection.front_id:
            del self._by_front[connection.front_id]
            self.dispatcher.front_disconnected(connection.front_id)
