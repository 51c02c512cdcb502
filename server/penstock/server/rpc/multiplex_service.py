"""Multiplex: many requests over one stream.

Owns one call: its reader, its writer, and the end of both. `multiplex_table.py` executes commands.
After each step, one message has the events of every request in the step; it is split if it would
exceed the size hint. While a write is blocked, the requests' backlogs grow, and the next message
carries more.

The call ends with OK once its client has closed its side and the last request has ended; with an
error on an invalid command, a stalled reader, or a drain. Whatever ends it, including cancellation
and a lost connection, its requests are released at once.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import grpc.aio

from penstock.server.front.errors import (
    INTERNAL,
    ErrorReason,
    Refusal,
    RequestError,
    refuse,
    refuse_field,
)
from penstock.server.front.front import Front
from penstock.server.front.watched_write import SharedWriter
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import (
    OK,
    CallAccounts,
    Context,
    HandlerWrapper,
    call_timeout_s,
    outcome_of,
    outcome_of_leaving,
    peer_of,
)
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageTurns
from penstock.server.rpc.multiplex_encoding import error_event
from penstock.server.rpc.multiplex_table import MultiplexCaller, MultiplexedRequest, MultiplexTable
from penstock.server.rpc.parsing import parse_request
from penstock.server.security.rights import Right
from penstock.v1 import generation_service_pb2 as pb

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
        """Note that no more commands follow: the stream ends when its last request has ended."""
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
        """Yield messages with all events that may be written now."""
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
        """Release a request; return its last `events`, with its error if it failed."""
        self._table.end(request)
        if request.refusal is None:
            return events
        status = self._wrapper.status(request.refusal, request.request_id)
        return [*events, error_event(request.key, status.SerializeToString())]


async def _has_ended_well(write: asyncio.Future[None]) -> bool:
    await asyncio.wait([write], timeout=_LAST_WRITE_S)
    return write.done() and not write.cancelled() and write.exception() is None


class MultiplexService:
    """The handler of Multiplex, over one front."""

    def __init__(
        self,
        front: Front,
        wrapper: HandlerWrapper,
        accounts: CallAccounts,
        gate: AccessControl | None = None,
        turns: LargeMessageTurns | None = None,
    ) -> None:
        self._front = front
        self._turns = turns or LargeMessageTurns()
        self._gate = gate or AccessControl(tenant_metadata_key=front.config.tenant_metadata_key)
        self._wrapper = wrapper
        self._accounts = accounts

    async def handle(self, context: Context) -> None:
        """Serve one call. Raises RequestError when it fails."""
        front = self._front
        tenant = self._gate.admit(context, Right.GENERATE).tenant
        if front.is_draining:
            raise refuse(ErrorReason.DRAINING)
        ready: SharedWriter[MultiplexedRequest] = SharedWriter()
        accounts = self._accounts
        caller = MultiplexCaller(
            tenant,
            peer_of(front, context),
            accounts.parent_of(context),
            admit=lambda: self._gate.admit_again(context, Right.GENERATE, tenant),
        )
        table = MultiplexTable(front, self._wrapper, ready, accounts, caller)
        writer = MultiplexWriter(front, self._wrapper, ready, table, context.write)
        take_turn = functools.partial(self._turns.take, tenant or context.peer())
        max_arrival_s = front.config.transport.max_arrival_s
        reader = _Reader(context.read, take_turn, table, ready, writer, max_arrival_s)
        front.shared_writers.add(ready)
        timeout_s = call_timeout_s(context)
        outcome = OK
        try:
            # The client sees that the stream is open before the first event.
            await context.send_initial_metadata(())
            reader.start()
            await writer.run()
        except RequestError as error:
            outcome = outcome_of(error.refusal)
            if reader.bug is not None:
                raise reader.bug from None
            raise
        except BaseException as error:
            is_left = isinstance(error, asyncio.CancelledError | grpc.aio.BaseError)
            outcome = outcome_of_leaving(context, timeout_s) if is_left else outcome_of(INTERNAL)
            raise
        finally:
            front.shared_writers.discard(ready)
            reader.stop()
            table.release_all(outcome)


class _Reader:
    """Runs the task that reads commands; closes the writer with the error if the task fails."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],
        take_turn: Callable[[], Awaitable[None]],
        table: MultiplexTable,
        ready: SharedWriter[MultiplexedRequest],
        writer: MultiplexWriter,
        max_arrival_s: float,
    ) -> None:
        self._read = read
        self._take_turn = take_turn
        self._max_arrival_s = max_arrival_s
        self._table = table
        self._ready = ready
        self._writer = writer
        self._task: asyncio.Task[None] | None = None
        self.bug: BaseException | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="multiplex commands")
        self._task.add_done_callback(self._on_done)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        data = await self._first()
        while data is not grpc.aio.EOF:
            if len(data) >= LARGE_BYTES:
                await self._take_turn()
            apply_command(*parse_request(pb.MultiplexRequest, data), self._table)
            await self._table.wait_for_room()
            data = await self._read()

    async def _first(self) -> Any:
        """Wait for the first command, which has a time limit; later commands have none."""
        try:
            async with asyncio.timeout(self._max_arrival_s):
                return await self._read()
        except TimeoutError:
            late = f"no command arrived within {self._max_arrival_s:g} s"
            refusal = Refusal(reason=ErrorReason.DEADLINE_EXCEEDED, message=late)
            raise RequestError(refusal) from None

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._writer.half_close()
        elif isinstance(error, RequestError):
            self._ready.cut(error.refusal)
        else:
            self.bug = error
            self._ready.cut(INTERNAL)


def apply_command(
    message: pb.MultiplexRequest, refusal: Refusal | None, table: MultiplexTable
) -> None:
    """Execute a client's command; `refusal`: found while its request was parsed. Raises
    RequestError if the command is invalid.
    """
    match message.WhichOneof("command"):
        case "submit":
            table.submit(message.submit, refusal)
        case "cancel":
            table.cancel(message.cancel.key)
        case "credit":
            if message.credit.num_credit_tokens < 1:
                raise refuse_field("credit.num_credit_tokens", "must be at least 1")
            table.give_credit(message.credit.key, message.credit.num_credit_tokens)
        case _:
            raise refuse_field("command", "one of submit, cancel and credit is required")
