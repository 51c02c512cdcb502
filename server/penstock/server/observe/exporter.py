"""A front's connection to the observer process: sends records of ended requests in batches, without
blocking.

A front is a process that serves gRPC. This module opens the connection, buffers unsent records and
counts dropped records. If the observer is down or slow, records are dropped, and the front is not
delayed. The listening socket stays open when the observer dies, so the next observer receives what
fronts have sent meanwhile.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from penstock.server.ipc.connection import Connection, PersistentConnection
from penstock.server.ipc.frames import CarryOut, Command, CommandResult
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

logger = logging.getLogger(__name__)

FULL = "full"
"""Drop reason: the buffer of unsent records is full, because the observer reads too slowly."""
NO_OBSERVER = "no_observer"
"""Drop reason: no observer accepts connections, or its connection was lost during the write."""

_FLUSH_S = 0.05
_FLUSH_BYTES = 64 * 1024
_MAX_FRAMES_PER_FLUSH = 16
_MAX_ANSWERS = 256
_MAX_VIEWS_PER_FRAME = 128
_MAX_QUERY_BYTES = 4096
_PAUSES_S = (0.05, 1.0)

_Connection: TypeAlias = Connection[ObserverFrame]


class Exporter:
    """Sends the records of one front to the observer. All calls must be made on the event loop that
    called `start`.

    `path` is the Unix socket of the observer, and `hello` the first frame on each connection.
    `max_bytes` and `max_records` limit the unsent records. `request_views` yields the live requests
    of the front for the observer's queries, and `execute` executes the observer's commands.
    `dropped` has the number of dropped records by reason.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        *,
        request_views: Callable[[], Iterable[FrontRequestView]],
        execute: CarryOut,
        max_bytes: int = 4 * 1024 * 1024,
        max_records: int = 20_000,
    ) -> None:
        self.dropped = {FULL: 0, NO_OBSERVER: 0}
        self._hello = hello
        self._request_views = request_views
        self._execute = execute
        self._max_bytes = max_bytes
        self._max_records = max_records
        self._records: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_in_flight = 0
        self._heartbeat: Heartbeat | None = None
        self._answers: deque[bytes] = deque()
        self._connection: PersistentConnection[ObserverFrame] = PersistentConnection(
            path,
            partial(
                Connection,
                "the observer",
                decode,
                on_frame=self._on_frame,
                on_writable=self._flush,
                max_frame_bytes=_MAX_QUERY_BYTES,
            ),
            on_open=self._on_open,
            on_closed=self._on_lost,
            pauses_s=_PAUSES_S,
            on_absent=self._on_absent,
        )
        self._is_absent = False
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    async def start(self) -> None:
        """Start connecting, and reconnect after each loss until `close`. Does not wait for the
        observer."""
        self._connection.start()

    def offer(self, payload: bytes) -> None:
        """Queue one encoded record. If there is no observer or if the buffer is full, drop and
        count the record."""
        if self._is_absent:
            self.dropped[NO_OBSERVER] += 1
            return
        num_bytes = self._num_bytes + len(payload)
        if num_bytes > self._max_bytes or len(self._records) >= self._max_records:
            self.dropped[FULL] += 1
            return
        self._records.append(payload)
        self._num_bytes = num_bytes
        if num_bytes >= _FLUSH_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._on_timer)

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send the state of this front. A newer heartbeat replaces an unsent one."""
        self._heartbeat = heartbeat
        self._flush()

    async def close(self, limit_s: float) -> None:
        """Send the remaining records for at most `limit_s` seconds, drop the others, and
        disconnect."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._drained()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._connection.close()
        self._is_absent = True
        self._drop_all(NO_OBSERVER)

    async def _drained(self) -> None:
        while not self._is_absent:
            self._emptied.clear()
            self._flush()
            connection = self._connection.current
            if connection is not None and connection.is_writable and not self._has_updates:
                return
            await self._emptied.wait()

    @property
    def _has_updates(self) -> bool:
        return bool(self._records or self._answers or self._heartbeat is not None)

    def _on_timer(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        """Write frames until the socket would block, nothing is left, or `_MAX_FRAMES_PER_FLUSH`
        frames are written; in the last case, schedule another call."""
        connection = self._connection.current
        if connection is None:
            return
        for _ in range(_MAX_FRAMES_PER_FLUSH):
            if not connection.is_writable:
                return  # `on_writable` calls this again.
            self._num_in_flight = 0
            if self._answers:
                connection.write(self._answers.popleft())
            elif self._heartbeat is not None:
                heartbeat, self._heartbeat = self._heartbeat, None
                connection.write(encode(heartbeat))
            elif self._records:
                self._write_records(connection)
            else:
                self._emptied.set()
                return
        asyncio.get_running_loop().call_soon(self._flush)

    def _write_records(self, connection: _Connection) -> None:
        payloads: list[bytes] = []
        num_bytes = 0
        while self._records and num_bytes < _FLUSH_BYTES:
            payload = self._records.popleft()
            payloads.append(payload)
            num_bytes += len(payload)
        self._num_bytes -= num_bytes
        self._num_in_flight = len(payloads)
        connection.write(encode(Records(payloads=tuple(payloads))))
        if connection.is_lost:
            # The connection is lost: the next connection sends these records.
            self._records.extendleft(reversed(payloads))
            self._num_bytes += num_bytes
            self._num_in_flight = 0

    def _on_open(self, connection: _Connection) -> None:
        connection.is_established = True
        connection.write(encode(self._hello))
        self._is_absent = False
        self._flush()

    def _on_absent(self) -> None:
        self._is_absent = True
        self._drop_all(NO_OBSERVER)
        self._emptied.set()

    def _on_lost(self, connection: _Connection) -> None:
        self._answers.clear()  # The queries belong to the lost connection.
        if connection.has_unsent:
            self.dropped[NO_OBSERVER] += self._num_in_flight
        self._num_in_flight = 0

    def _drop_all(self, reason: str) -> None:
        self.dropped[reason] += len(self._records)
        self._records.clear()
        self._num_bytes = 0

    def _on_frame(self, connection: _Connection, frame: ObserverFrame) -> None:
        match frame:
            case LiveQuery(ticket=ticket):
                self._answer_live(connection, ticket)
            case Command() as command:
                loop = asyncio.get_running_loop()

                def answer(done: CommandResult) -> None:
                    loop.call_soon_threadsafe(self._answer, connection, encode(done))

                self._execute(command, answer)
            case other:
                raise FrameError(f"unexpected frame from an observer: {type(other).__name__}")

    def _answer_live(self, connection: _Connection, ticket: int) -> None:
        # Encode and send in parts, so that the streams on this event loop are not delayed.
        views = iter(self._request_views())
        loop = asyncio.get_running_loop()

        def next_part() -> None:
            part = tuple(itertools.islice(views, _MAX_VIEWS_PER_FRAME))
            is_last = len(part) < _MAX_VIEWS_PER_FRAME
            self._answer(connection, encode(LiveAnswer(ticket=ticket, views=part, is_last=is_last)))
            if not is_last and connection is self._connection.current:
                loop.call_soon(next_part)

        next_part()

    def _answer(self, connection: _Connection, frame: bytes) -> None:
        if connection is not self._connection.current:
            return  # The observer that sent the command is disconnected.
        if len(self._answers) >= _MAX_ANSWERS:
            logger.error("the observer sends queries and does not read: disconnecting")
            connection.abort()
            return
        self._answers.append(frame)
        self._flush()
