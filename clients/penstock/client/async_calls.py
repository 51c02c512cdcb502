"""How the asyncio client makes a call: its turn, its attempts, its channel, its end.

Owns one pool and, for a client that multiplexes, the Multiplex calls on it. Does not know what is
asked for: `client.py` does.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias, TypeVar

import grpc

import penstock.v1 as pb
from penstock.client.async_multiplex import AsyncMultiplexer
from penstock.client.async_pool import AsyncPool
from penstock.client.call_settings import (
    CallSettings,
    Metadata,
    Pairs,
    require_no_metadata,
    traceparent_of,
)
from penstock.client.errors import PenstockError, Unavailable
from penstock.client.events import Accepted, Event
from penstock.client.multiplex import MultiplexConfig
from penstock.client.own_failures import client_closed
from penstock.client.pool import is_silence
from penstock.client.retry import Attempts
from penstock.client.status import as_error, error_cause
from penstock.client.stream_reader import StreamReader
from penstock.client.trace_context import TraceContext

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
UnaryMethod: TypeAlias = (
    "Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]]"
)
"""Finds a method on the channel that an attempt got."""


class _Stream(Protocol):
    """One attempt at a stream: a call of its own, or a request on a Multiplex call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class AsyncCalls:
    """Makes calls, each with as many attempts as the settings allow."""

    def __init__(
        self,
        pool: AsyncPool,
        *,
        settings: CallSettings,
        multiplex: MultiplexConfig | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.is_multiplexed = multiplex is not None
        self._multiplex = multiplex
        self._multiplexers: dict[int, AsyncMultiplexer] = {}
        self._sleep = sleep
        # Closing a channel of grpc.aio leaves its open calls hanging; they are cancelled by us.
        self._open_calls: set[_Cancellable] = set()

    def pairs(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Metadata of a generation. Raises ValueError for some that cannot be sent."""
        if self.is_multiplexed:
            require_no_metadata(metadata)
        return self.settings.call_metadata(metadata, trace)

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for open calls, cancel what is left, hang up."""
        await self.pool.drain(grace_s)
        self.pool.is_closed = True
        multiplexers = tuple(self._multiplexers.values())
        self._multiplexers.clear()
        for multiplexer in multiplexers:
            await multiplexer.close()
        for call in tuple(self._open_calls):
            call.cancel()
        await self.pool.close()

    async def stream(
        self,
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: Pairs,
        *,
        is_whole: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """The events of a generation.

        `is_whole`: nobody sees them before the last, so output does not stand against a retry.
        """
        async with self.pool.turn(attempts.timeout_s()):
            while True:
                reader = StreamReader()
                index, channel = self.pool.take()
                call: _Stream | None = None
                is_unavailable = False
                try:
                    call = self._start(index, channel, request, attempts.timeout_s(), metadata)
                    self._open_calls.add(call)
                    async for response in call:
                        event = reader.receive(response)
                        if isinstance(event, Accepted):
                            self.pool.answered(index)
                        if event is not None:
                            yield event
                except (grpc.RpcError, PenstockError) as failed:
                    error = as_error(failed, request_id=reader.request_id)
                    is_unavailable = self._is_unserved(index, error, reader.request_id)
                    has_output = reader.has_output and not is_whole
                    delay_s = attempts.delay_after(error, has_output=has_output)
                    if delay_s is None:
                        raise error from error_cause(failed)
                except asyncio.CancelledError:
                    self._explain_cancellation()
                    raise
                else:
                    yield reader.end()
                    return
                finally:
                    if call is not None:
                        call.cancel()
                        self._open_calls.discard(call)
                    self.pool.release(index, is_unavailable=is_unavailable)
                await self._sleep(delay_s)

    async def unary(
        self,
        method: "UnaryMethod[RequestT, ResponseT]",
        request: RequestT,
        attempts: Attempts,
        metadata: Pairs,
    ) -> ResponseT:
        """The answer to a call that has one."""
        self.pool.require_open()
        while True:
            index, channel = self.pool.take()
            is_unavailable = False
            call = method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            self._open_calls.add(call)
            try:
                return await call
            except grpc.RpcError as failed:
                error = as_error(failed)
                is_unavailable = self._is_unserved(index, error, error.request_id)
                delay_s = attempts.delay_after(error)
                if delay_s is None:
                    raise error from failed
            except asyncio.CancelledError:
                self._explain_cancellation()
                raise
            finally:
                self._open_calls.discard(call)
                self.pool.release(index, is_unavailable=is_unavailable)
            await self._sleep(delay_s)

    @asynccontextmanager
    async def borrowed_channel(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        """A channel for a call that is made once."""
        self.pool.require_open()
        index, channel = self.pool.take()
        try:
            yield channel
        finally:
            self.pool.release(index)

    def _is_unserved(self, index: int, error: PenstockError, request_id: str) -> bool:
        """Whether an attempt says that nobody serves calls on its channel."""
        if is_silence(error, request_id):
            return self.pool.is_lost(index)
        return isinstance(error, Unavailable)

    def _start(
        self,
        index: int,
        channel: grpc.aio.Channel,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        metadata: Pairs,
    ) -> _Stream:
        if self._multiplex is None:
            stub = pb.GenerationServiceStub(channel)
            return stub.Generate(request, timeout=timeout_s, metadata=metadata)
        multiplexer = self._multiplexers.get(index)
        if multiplexer is None:
            multiplexer = AsyncMultiplexer(
                channel,
                config=self._multiplex,
                metadata=self.settings.metadata,
                clock=self.settings.clock,
            )
            self._multiplexers[index] = multiplexer
        return multiplexer.open(request, timeout_s, traceparent_of(metadata))

    def _explain_cancellation(self) -> None:
        """gRPC shows a closed channel as CancelledError, which nobody asked this task for."""
        task = asyncio.current_task()
        if self.pool.is_closed and not (task is not None and task.cancelling()):
            raise client_closed() from None
