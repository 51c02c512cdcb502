"""Sends the requests of the asyncio client over Multiplex calls, each of which has many requests.

Owns the calls, the tasks that read and write them, and the requests' timers. `multiplex.py` maps
events to requests and decides when credit (the tokens that the server may still send) is granted.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

import grpc

import penstock.v1 as pb
from penstock.client.call_settings import Pairs
from penstock.client.errors import PenstockError
from penstock.client.local_errors import (
    client_closed,
    deadline_passed,
    multiplex_broken,
    multiplex_ended,
    multiplex_error,
)
from penstock.client.multiplex import MultiplexConfig, MultiplexedRequest, MultiplexedRequests
from penstock.client.status import error_from_call
from penstock.client.without_loop import run_in_one_step

_CORE_ERROR_DETAILS = "Internal error from Core"
_STATUS_TIMEOUT_S = 5.0


class AsyncMultiplexStream:
    """The response messages of one request on a Multiplex call, with the interface of a
    Generate call."""

    def __init__(self, call: "_Call", request: pb.GenerateRequest) -> None:
        self._call = call
        self._request = request
        self._open_request: MultiplexedRequest | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, timeout_s: float | None, traceparent: str | None) -> None:
        """Submit the request. It fails after `timeout_s` seconds; None: no timeout in this client.
        Raises ResourceExhausted if the request is too large."""
        self._open_request = self._call.submit(self._request, timeout_s, traceparent, self._wake)
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, self._call.expire, self._open_request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        open_request = self._open_request
        if open_request is None:
            raise StopAsyncIteration
        while True:
            try:
                response = open_request.take()
            except EOFError:
                raise StopAsyncIteration from None
            if response is not None:
                self._call.send(open_request.credit())
                return response
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def cancel(self) -> bool:
        """Cancel the request if it has not ended. Returns True if it was open."""
        if self._timer is not None:
            self._timer.cancel()
        return self._open_request is not None and self._call.cancel(self._open_request)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncMultiplexer:
    """The Multiplex calls of one channel: the current call, and older calls with open requests."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        config: MultiplexConfig,
        metadata: Pairs,
        clock: Callable[[], float],
    ) -> None:
        self._stub = pb.GenerationServiceStub(channel)
        self._config = config
        self._metadata = metadata
        self._clock = clock
        self._calls: list[_Call] = []

    def open(
        self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> AsyncMultiplexStream:
        """Start a request. Opens a new call if the current call does not accept it.

        Raises DeadlineExceeded if `timeout_s` is not positive, and ResourceExhausted if the request
        is too large.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise deadline_passed()
        stream = AsyncMultiplexStream(self._current(), request)
        stream.start(timeout_s, traceparent)
        return stream

    async def close(self) -> None:
        """Cancel the calls. Readers of open requests get CallCancelled."""
        for call in tuple(self._calls):
            await call.close()

    def _current(self) -> "_Call":
        now_s = self._clock()
        for call in self._calls:
            if call.requests.can_submit(now_s):
                return call
            call.retire()
        requests = MultiplexedRequests(self._config, opened_at_s=now_s)
        call = _Call(self._stub.Multiplex(metadata=self._metadata), requests, self._calls.remove)
        self._calls.append(call)
        return call


class _Call:
    """One Multiplex call: its requests, the commands not sent yet, and the tasks that read
    and write."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]",
        requests: MultiplexedRequests,
        on_end: "Callable[[_Call], None]",
    ) -> None:
        self._call = call
        self.requests = requests
        self._on_end = on_end
        self._commands: deque[pb.MultiplexRequest] = deque()
        self._is_retired = False
        self._writer: asyncio.Task[None] | None = None
        self._status: asyncio.Future[grpc.aio.AioRpcError] = (
            asyncio.get_running_loop().create_future()
        )
        call.add_done_callback(self._on_status)
        self._reader = asyncio.create_task(self._read())

    def submit(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        traceparent: str | None,
        wake: Callable[[], None],
    ) -> MultiplexedRequest:
        open_request, command = self.requests.submit(
            request, timeout_s=timeout_s, traceparent=traceparent, wake=wake
        )
        self.send(command)
        return open_request

    def send(self, command: pb.MultiplexRequest | None) -> None:
        """Queue a command, unless it is None or the call has ended. One task writes the commands
        one by one, as gRPC requires."""
        if command is not None and not self.requests.has_ended:
            self._commands.append(command)
            self._write_soon()

    def expire(self, open_request: MultiplexedRequest) -> None:
        """Fail a request whose deadline passed, and cancel it on the server, unless it has
        ended."""
        self.send(self.requests.expire(open_request))
        self._end_when_unused()

    def cancel(self, open_request: MultiplexedRequest) -> bool:
        """Cancel this request; its reader gets CallCancelled. Returns True if it was still open."""
        command = self.requests.cancel(open_request)
        self.send(command)
        self._end_when_unused()
        return command is not None

    def retire(self) -> None:
        """Accept no more requests. The call ends when its last request has ended."""
        self._is_retired = True
        self._end_when_unused()

    async def close(self) -> None:
        self.requests.end(client_closed())
        self._call.cancel()
        await asyncio.wait([self._reader])

    def _end_when_unused(self) -> None:
        if self._is_retired and not self.requests.num_open and not self.requests.has_ended:
            self._write_soon()

    def _write_soon(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._commands:
                await self._call.write(self._commands.popleft())
            if self._is_retired and not self.requests.num_open:
                await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            # The call has ended, and the reader has the reason.
            self.requests.stop()
            self._commands.clear()

    async def _read(self) -> None:
        error: PenstockError = multiplex_ended()
        try:
            async for response in self._call:
                self.requests.receive(response)
                if self._is_retired:
                    self._end_when_unused()
        except grpc.RpcError as failed:
            self.requests.stop()
            error = await self._typed_error(failed)
        except PenstockError as broken:
            error = broken
        except asyncio.CancelledError:
            error = client_closed()
        finally:
            self.requests.end(error)
            self._commands.clear()
            self._call.cancel()
            self._on_end(self)

    async def _typed_error(self, failed: grpc.RpcError) -> PenstockError:
        """Return the error for the failed call, from the status that the server sent.

        When a write fails, for example because the server has just ended the call, grpc.aio fails
        the call with INTERNAL, although the status from the server has arrived or arrives shortly
        afterwards. If that status does not arrive within `_STATUS_TIMEOUT_S` seconds, the error is
        `multiplex_broken()`.
        """
        if not isinstance(failed, grpc.aio.AioRpcError) or failed.details() != _CORE_ERROR_DETAILS:
            return multiplex_error(error_from_call(failed))
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                return multiplex_error(error_from_call(await self._status))
        except TimeoutError:
            return multiplex_broken()

    def _on_status(self, _call: object) -> None:
        """Store the first status that grpc.aio did not create itself. Called for each status of the
        call.

        The status is read without a task, because a task would run after this callback, when gRPC
        may have replaced the status.
        """
        call = self._call
        details = run_in_one_step(call.details())
        if details != _CORE_ERROR_DETAILS and not self._status.done():
            self._status.set_result(
                grpc.aio.AioRpcError(
                    run_in_one_step(call.code()),
                    run_in_one_step(call.initial_metadata()),
                    run_in_one_step(call.trailing_metadata()),
                    details=details,
                )
            )
