"""Multiplex: many requests over one stream.

Owns one call: its reader, its writer, and the end of both. `multiplex_table.py` executes commands,
`multiplex_writer.py` writes events.

The call ends with OK once its client has closed its side and the last request has ended; with an
error on an invalid command, a stalled reader, or a drain. However it ends, cancellation and lost
connections included, its requests are released at once.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from penstock.server.front.errors import ErrorReason, Refusal, RequestError, refuse, refuse_field
from penstock.server.front.front import Front
from penstock.server.front.shared_writer import SharedWriter
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import Context, HandlerWrapper
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageTurns
from penstock.server.rpc.multiplex_request import MultiplexedRequest
from penstock.server.rpc.multiplex_table import MultiplexCaller, MultiplexTable
from penstock.server.rpc.multiplex_writer import MultiplexWriter
from penstock.server.rpc.outcomes import OK, call_timeout_s, outcome_of, outcome_of_leaving
from penstock.server.rpc.parsing import parse_request
from penstock.server.rpc.request_accounts import CallAccounts, peer_of
from penstock.server.security.rights import Right
from penstock.v1 import generation_service_pb2 as pb

_INTERNAL = Refusal(reason=ErrorReason.INTERNAL)


class MultiplexService:
    """The handler, over one front."""

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
            outcome = outcome_of_leaving(context, timeout_s) if is_left else outcome_of(_INTERNAL)
            raise
        finally:
            front.shared_writers.discard(ready)
            reader.stop()
            table.release_all(outcome)


class _Reader:
    """The task that reads commands; when it fails, it closes the writer with the error."""

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
        """The first command must come in time; later ones may take any time."""
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
            self._ready.cut(_INTERNAL)


def apply_command(
    message: pb.MultiplexRequest, refusal: Refusal | None, table: MultiplexTable
) -> None:
    """Execute a client's command; `refusal`: of its request. Raises RequestError when it is
    invalid.
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
