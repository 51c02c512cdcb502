"""Implements Multiplex, which serves many requests over one stream.

Contains the reader and the writer of one call, and ends both. `multiplex_table.py` executes
commands. After each step of the engine, one message has the events of all requests of the call in
that step; it is split if it would exceed the soft limit of the message size. While a write is
blocked, the events of the requests accumulate, and the next message carries more.

The call ends with OK when its client has closed its side and the last request has ended. It ends
with an error after an invalid command, if the first command does not arrive in time, if its reader
stalls, or if the server drains and no request is left before the client has closed its side. In all
cases, including cancellation and a lost connection, its requests are released (`Front.release_all`)
immediately.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import grpc.aio

from penstock.server.front.errors import (
    INTERNAL,
    ErrorReason,
    Failure,
    RequestError,
    invalid_field,
    request_error,
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
    outcome_of_early_end,
    peer_of,
)
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageQueue
from penstock.server.rpc.multiplex_encoding import error_event
from penstock.server.rpc.multiplex_table import MultiplexCaller, MultiplexedRequest, MultiplexTable
from penstock.server.rpc.parsing import parse_request
from penstock.server.security.rights import Right
from penstock.v1 import generation_service_pb2 as pb

_LAST_WRITE_S: Final = 1.0
"""How long a write in progress may take to return after its call was cancelled, in seconds."""


class MultiplexWriter:
    """Writes the messages of one call until the stream ends.

    `ready` queues the requests that have events. `write` sends one message and blocks while the
    client does not read.
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
        """Record that the client sends no more commands. The stream ends when its last request has
        ended."""
        self._is_half_closed = True
        self._ready.wake()

    async def run(self) -> None:
        """Write events until the stream ends.

        Raises RequestError: DRAINING if the server drains and no request is left before the client
        has closed its side, or the error that closed the stream.
        """
        ready, clock = self._ready, self._front.clock
        try:
            while not self._is_over():
                for message in self._messages(await ready.take()):
                    ready.begin_write(clock())
                    await self._send(message)
                    ready.end_write(clock())
                self._table.close_ended_accounts()
        except asyncio.CancelledError:
            # The client has disconnected, or it stalled and the stream was closed during the write.
            if ready.was_interrupted() and ready.failure is not None:
                raise RequestError(ready.failure) from None
            raise

    async def _send(self, message: bytes) -> None:
        """Write one message.

        If a client disconnects as soon as it has received its last event, the call is cancelled
        before the write returns. The write is then awaited for up to `_LAST_WRITE_S` seconds. If it
        succeeds, the requests whose last event it contains are recorded as ended normally.
        """
        if not self._table.has_unwritten_ends:
            await self._write(message)
            return
        write = asyncio.ensure_future(self._write(message))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            if self._ready.failure is None and await _has_ended_well(write):
                self._table.close_ended_accounts()
            raise
        finally:
            write.cancel()

    def _is_over(self) -> bool:
        if len(self._table):
            return False
        if self._front.is_draining and not self._is_half_closed:
            raise request_error(ErrorReason.DRAINING)
        return self._is_half_closed

    def _messages(self, ready: Iterable[MultiplexedRequest]) -> Iterator[bytes]:
        """Yield messages with all events of the requests in `ready` that may be written now.
        Removes the requests that have ended."""
        parts: list[bytes] = []
        size = 0
        for request in ready:
            try:
                events = request.take()
            except Exception as error:
                # An internal error: this request ends, and the others must not be affected.
                failure = self._wrapper.internal_error(
                    "Multiplex",
                    error,
                    request_id=request.request_id,
                    trace_id=request.account.trace.trace_id,
                )
                request.fail_with(failure)
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
        """Remove an ended request and return its last `events`, with its error if it failed."""
        self._table.end(request)
        if request.failure is None:
            return events
        status = self._wrapper.status(request.failure, request.request_id)
        return [*events, error_event(request.key, status.SerializeToString())]


async def _has_ended_well(write: asyncio.Future[None]) -> bool:
    await asyncio.wait([write], timeout=_LAST_WRITE_S)
    return write.done() and not write.cancelled() and write.exception() is None


class MultiplexService:
    """The handler of Multiplex, for one gRPC server process."""

    def __init__(
        self,
        front: Front,
        wrapper: HandlerWrapper,
        accounts: CallAccounts,
        access: AccessControl | None = None,
        large_messages: LargeMessageQueue | None = None,
    ) -> None:
        self._front = front
        self._large_messages = large_messages or LargeMessageQueue()
        self._access = access or AccessControl(tenant_metadata_key=front.config.tenant_metadata_key)
        self._wrapper = wrapper
        self._accounts = accounts

    async def multiplex(self, context: Context) -> None:
        """Serve one call until it ends (see the module docstring). Raises RequestError if it ends
        with an error."""
        front = self._front
        tenant = self._access.authorize(context, Right.GENERATE).tenant
        if front.is_draining:
            raise request_error(ErrorReason.DRAINING)
        ready: SharedWriter[MultiplexedRequest] = SharedWriter()
        accounts = self._accounts
        caller = MultiplexCaller(
            tenant,
            peer_of(front, context),
            accounts.parent_of(context),
            authorize=lambda: self._access.authorize_again(context, Right.GENERATE, tenant),
        )
        table = MultiplexTable(front, self._wrapper, ready, accounts, caller)
        writer = MultiplexWriter(front, self._wrapper, ready, table, context.write)
        acquire_permit = functools.partial(self._large_messages.acquire, tenant or context.peer())
        max_arrival_s = front.config.transport.max_arrival_s
        reader = _CommandReader(context.read, acquire_permit, table, ready, writer, max_arrival_s)
        front.shared_writers.add(ready)
        timeout_s = call_timeout_s(context)
        outcome = OK
        try:
            # Send the headers, so that the stream is open at the client before the first event.
            await context.send_initial_metadata(())
            reader.start()
            await writer.run()
        except RequestError as error:
            outcome = outcome_of(error.failure)
            if reader.internal_error is not None:
                raise reader.internal_error from None
            raise
        except BaseException as error:
            is_disconnect = isinstance(error, asyncio.CancelledError | grpc.aio.BaseError)
            outcome = (
                outcome_of_early_end(context, timeout_s) if is_disconnect else outcome_of(INTERNAL)
            )
            raise
        finally:
            front.shared_writers.discard(ready)
            reader.stop()
            table.release_all(outcome)


class _CommandReader:
    """Runs the task that reads commands. If the task fails, closes the writer with the error.

    `internal_error` is the exception if the task failed with an error that is not a RequestError;
    otherwise None.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],
        acquire_permit: Callable[[], Awaitable[None]],
        table: MultiplexTable,
        ready: SharedWriter[MultiplexedRequest],
        writer: MultiplexWriter,
        max_arrival_s: float,
    ) -> None:
        self._read = read
        self._acquire_permit = acquire_permit
        self._max_arrival_s = max_arrival_s
        self._table = table
        self._ready = ready
        self._writer = writer
        self._task: asyncio.Task[None] | None = None
        self.internal_error: BaseException | None = None

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
                await self._acquire_permit()
            apply_command(*parse_request(pb.MultiplexRequest, data), self._table)
            await self._table.wait_for_unsent_rejections()
            data = await self._read()

    async def _first(self) -> Any:
        """Return the first command as bytes, or EOF. Raises RequestError if it does not arrive in
        time; later commands have no time limit."""
        try:
            async with asyncio.timeout(self._max_arrival_s):
                return await self._read()
        except TimeoutError:
            late = f"no command arrived within {self._max_arrival_s:g} s"
            failure = Failure(reason=ErrorReason.DEADLINE_EXCEEDED, message=late)
            raise RequestError(failure) from None

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._writer.half_close()
        elif isinstance(error, RequestError):
            self._ready.abort(error.failure)
        else:
            self.internal_error = error
            self._ready.abort(INTERNAL)


def apply_command(
    message: pb.MultiplexRequest, failure: Failure | None, table: MultiplexTable
) -> None:
    """Execute a command from the client.

    `failure` is the error found while the request of a submit command was parsed; None if there is
    none. Raises RequestError if the command is invalid.
    """
    match message.WhichOneof("command"):
        case "submit":
            table.submit(message.submit, failure)
        case "cancel":
            table.cancel(message.cancel.key)
        case "credit":
            if message.credit.num_credit_tokens < 1:
                raise invalid_field("credit.num_credit_tokens", "must be at least 1")
            table.give_credit(message.credit.key, message.credit.num_credit_tokens)
        case _:
            raise invalid_field("command", "one of submit, cancel and credit is required")
