"""Receives the frames from fronts (gRPC server processes) in the observer, queries the fronts for
live requests, and sends them commands.

Accepts and closes the connections of the fronts. The supervisor owns the listening socket, so that
the next observer receives frames that were sent while no observer was running.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.server.ipc.connection import Connection, PendingCalls
from penstock.server.ipc.frames import Action, Command, CommandResult
from penstock.server.ipc.wire import FrameError
from penstock.server.observe.frames import (
    FrontRequestView,
    Heartbeat,
    Hello,
    LiveAnswer,
    LiveQuery,
    ObserverFrame,
    Records,
    decode,
    encode,
)
from penstock.server.observe.listeners import ServiceListener
from penstock.server.observe.request_record import RequestRecord, decode_record

logger = logging.getLogger(__name__)

_MAX_LOGGED_UNREADABLE = 20
_MAX_UNSENT_BYTES = 1024 * 1024
_Connection: TypeAlias = Connection[ObserverFrame]


class FrontUnavailable(Exception):
    """The front cannot be reached. The message is for the operator."""


@dataclass(slots=True, eq=False)
class _ConnectedFront:
    front_id: int
    pid: int
    connection: _Connection
    view_queries: PendingCalls[tuple[FrontRequestView, ...]] = field(
        default_factory=PendingCalls[tuple[FrontRequestView, ...]]
    )
    parts: dict[int, list[FrontRequestView]] = field(
        default_factory=dict[int, list[FrontRequestView]]
    )
    commands: PendingCalls[CommandResult] = field(default_factory=PendingCalls[CommandResult])
    last_heartbeat: Heartbeat | None = None

    def query_live(self) -> "asyncio.Future[tuple[FrontRequestView, ...]]":
        """Query the live requests of the front; return the future of the response."""
        ticket, answer = self.view_queries.add()
        self.connection.write(encode(LiveQuery(ticket=ticket)))
        return answer

    def add_live_answer(self, answer: LiveAnswer) -> None:
        part = self.parts.setdefault(answer.ticket, [])
        part += answer.views
        if answer.is_last:
            self.view_queries.resolve(answer.ticket, tuple(self.parts.pop(answer.ticket)))

    def send_command(self, action: Action) -> "asyncio.Future[CommandResult]":
        """Send a command; return the future of its result."""
        ticket, answer = self.commands.add()
        self.connection.write(encode(Command(ticket=ticket, action=action)))
        return answer

    def fail_pending(self) -> None:
        """Fail the pending queries and commands, because the front has disconnected."""
        gone = FrontUnavailable(f"front {self.front_id} is gone")
        self.view_queries.fail(gone)
        self.commands.fail(gone)


class FrontReceiver:
    """Receives the frames of all fronts and passes records and heartbeats to `listener`. All calls
    except `pids` must be made on the event loop that called `start`.

    `num_unreadable` is the number of records that could not be decoded.
    """

    def __init__(self, listener: ServiceListener) -> None:
        self.num_unreadable = 0
        self._listener = listener
        self._connections: dict[_Connection, _ConnectedFront | None] = {}
        self._by_id: dict[int, _ConnectedFront] = {}
        self._server: asyncio.AbstractServer | None = None
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def front_ids(self) -> tuple[int, ...]:
        """Ids of the connected fronts, in increasing order."""
        return tuple(sorted(self._by_id))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the connected fronts, by front id. Thread-safe."""
        # Copying is atomic. Iterating over the dictionary itself would fail when a front connects.
        return {front_id: front.pid for front_id, front in self._by_id.copy().items()}

    @property
    def num_live(self) -> int:
        """Number of live requests of all fronts, according to their last heartbeats."""
        heartbeats = [front.last_heartbeat for front in self._by_id.values()]
        return sum(heartbeat.num_live for heartbeat in heartbeats if heartbeat is not None)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, including connections that fronts opened before this
        call."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._new_connection, sock=listener)

    async def close(self, limit_s: float) -> None:
        """Receive the last frames of ending fronts for at most `limit_s` seconds, then
        disconnect."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_empty.wait()
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.abort()

    async def request_views(self, limit_s: float) -> tuple[tuple[FrontRequestView, ...], bool]:
        """Return the live requests of the fronts that responded within `limit_s` seconds, and True
        if all connected fronts responded."""
        queries = [front.query_live() for front in self._by_id.values()]
        if not queries:
            return (), True
        await asyncio.wait(queries, timeout=limit_s)
        views: list[FrontRequestView] = []
        is_complete = True
        for answer in queries:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                views += answer.result()
            else:
                is_complete = False
                answer.cancel()
        return tuple(views), is_complete

    async def command(self, front_id: int, action: Action, limit_s: float) -> CommandResult:
        """Send a command to one front and return its result.

        Raises FrontUnavailable if the front is not connected, disconnects, or does not respond
        within `limit_s` seconds.
        """
        front = self._by_id.get(front_id)
        if front is None:
            raise FrontUnavailable(f"there is no front {front_id}")
        try:
            async with asyncio.timeout(limit_s):
                return await front.send_command(action)
        except TimeoutError:
            raise FrontUnavailable(f"front {front_id} does not respond") from None

    def _new_connection(self) -> _Connection:
        return Connection(
            "a front",
            decode,
            on_frame=self._on_frame,
            on_open=self._on_open,
            on_closed=self._on_closed,
            max_unsent_bytes=_MAX_UNSENT_BYTES,
        )

    def _on_open(self, connection: _Connection) -> None:
        self._connections[connection] = None
        self._is_empty.clear()

    def _on_closed(self, connection: _Connection) -> None:
        front = self._connections.pop(connection, None)
        if not self._connections:
            self._is_empty.set()
        if front is None:
            return
        front.fail_pending()
        if self._by_id.get(front.front_id) is front:
            del self._by_id[front.front_id]
            self._listener.front_disconnected(front.front_id)

    def _on_frame(self, connection: _Connection, frame: ObserverFrame) -> None:
        front = self._connections.get(connection)
        if front is not None:
            self._handle_frame(front, frame)
        elif isinstance(frame, Hello):
            front = _ConnectedFront(front_id=frame.front_id, pid=frame.pid, connection=connection)
            connection.name = f"front {frame.front_id}"
            self._connections[connection] = self._by_id[frame.front_id] = front
        else:
            raise FrameError("the first frame is not a hello")

    def _handle_frame(self, front: _ConnectedFront, frame: ObserverFrame) -> None:
        match frame:
            case Records(payloads=payloads):
                self._add_records(payloads)
            case Heartbeat() as heartbeat:
                front.last_heartbeat = heartbeat
                self._listener.add_heartbeat(heartbeat)
            case LiveAnswer() as answer:
                front.add_live_answer(answer)
            case CommandResult() as answer:
                front.commands.resolve(answer.ticket, answer)
            case other:
                raise FrameError(f"unexpected frame from a front: {type(other).__name__}")

    def _add_records(self, payloads: tuple[bytes, ...]) -> None:
        records: list[RequestRecord] = []
        for payload in payloads:
            try:
                records.append(decode_record(payload))
            except ValueError as error:
                self.num_unreadable += 1
                if self.num_unreadable <= _MAX_LOGGED_UNREADABLE:
                    logger.error("a record cannot be read: %s", error)  # noqa: TRY400 (no traceback)
        if records:
            self._listener.add_records(records)
