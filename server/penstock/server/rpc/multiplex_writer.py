"""Writes the events of all requests of a Multiplex stream, in as few messages as possible.

After each step one message has the events of every request that the step touched; it is split when
it would exceed the size hint. While a write is blocked the requests' backlogs grow, and the next
message carries more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

from penstock.server.front.errors import ErrorReason, RequestError, refuse
from penstock.server.front.front import Front
from penstock.server.front.shared_writer import SharedWriter
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.rpc.multiplex_encoding import error_event
from penstock.server.rpc.multiplex_request import MultiplexedRequest
from penstock.server.rpc.multiplex_table import MultiplexTable

_LAST_WRITE_S: Final = 1.0
"""How long a write in progress may take to return after its call was cancelled."""


class MultiplexWriter:
    """Writes until the stream ends; `write` sends one message and blocks while the client does not
    read.
    """

    def __init__(
        self,
        front: Front,
        wrapper: HandlerWrapper,
        ready: SharedWriter[MultiplexedRequest],
        table: MultiplexTable,
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._front = front
        self._wrapper = wrapper
        self._ready = ready
        self._table = table
        self._write = write
        self._max_message_bytes = front.config.max_shared_message_bytes_hint
        self._is_half_closed = False

    def half_close(self) -> None:
        """No more commands will come: the stream ends when its last request has ended."""
        self._is_half_closed = True
        self._ready.wake()

    async def run(self) -> None:
        """Write events until the stream ends.

        Raises RequestError: DRAINING once a stopping server has no more events, or the error that
        closed the stream.
        """
        ready, clock = self._ready, self._front.clock
        try:
            while not self._is_over():
                for message in self._messages(await ready.take()):
                    ready.begin_write(clock())
                    await self._send(message)
                    ready.end_write(clock())
                self._table.settle()
        except asyncio.CancelledError:
            # The client disconnected, or its reader stalled and the stream was closed during the
            # write.
            if ready.was_cut_off() and ready.refusal is not None:
                raise RequestError(ready.refusal) from None
            raise

    async def _send(self, message: bytes) -> None:
        """Write one message.

        A client may disconnect as soon as it has the last event of its last request, and the call
        may be cancelled here before the write returns: requests written by then have finished.
        """
        if not self._table.has_unwritten_ends:
            await self._write(message)
            return
        write = asyncio.ensure_future(self._write(message))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            if self._ready.refusal is None and await _has_ended_well(write):
                self._table.settle()
            raise
        finally:
            write.cancel()

    def _is_over(self) -> bool:
        if len(self._table):
            return False
        if self._front.is_draining and not self._is_half_closed:
            raise refuse(ErrorReason.DRAINING)
        return self._is_half_closed

    def _messages(self, ready: Iterable[MultiplexedRequest]) -> Iterator[bytes]:
        """Messages of everything that may be written now."""
        parts: list[bytes] = []
        size = 0
        for request in ready:
            try:
                events = request.take()
            except Exception as error:
                # A bug in our own code: this request ends, the others must not be affected.
                refusal = self._wrapper.internal_error(
                    "Multiplex",
                    error,
                    request_id=request.request_id,
                    trace_id=request.account.trace.trace_id,
                )
                request.break_with(refusal)
                events = ()
            if request.is_ended:
                events = self._end(request, events)
            for event in events:
                if size + len(event) > self._max_message_bytes and parts:
                    yield b"".join(parts)
                    parts.clear()
                    size = 0
                parts.append(event)
                size += len(event)
        if parts:
            yield b"".join(parts)

    def _end(self, request: MultiplexedRequest, events: Sequence[bytes]) -> Sequence[bytes]:
        """`events` were its last: release it, and add the error that it ended with, if any."""
        self._table.end(request)
        if request.refusal is None:
            return events
        status = self._wrapper.status(request.refusal, request.request_id)
        return [*events, error_event(request.key, status.SerializeToString())]


async def _has_ended_well(write: asyncio.Future[None]) -> bool:
    await asyncio.wait([write], timeout=_LAST_WRITE_S)
    return write.done() and not write.cancelled() and write.exception() is None
