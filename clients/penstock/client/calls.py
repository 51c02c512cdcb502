"""How a client makes a call: admission, attempts, channel, end.

Owns the connections and, for a client that multiplexes, the Multiplex calls on them. Independent of
the content of calls (`client.py`) and of the runtime, event loop or threads (`runtime.py`,
`blocking.py`).
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeAlias, TypeVar

import grpc

import penstock.v1 as pb
from penstock.client.call_settings import (
    CallSettings,
    Metadata,
    Pairs,
    require_no_metadata,
    traceparent_of,
)
from penstock.client.connections import Connections
from penstock.client.decoding import decode_seconds
from penstock.client.errors import CallCancelled, PenstockError, Unavailable
from penstock.client.events import Accepted, Event, Finished
from penstock.client.multiplex import MultiplexConfig
from penstock.client.own_failures import client_closed
from penstock.client.passage import Passage
from penstock.client.pool import is_silence
from penstock.client.resuming import ResumePoint
from penstock.client.retry import Attempts
from penstock.client.runtime import Canceller, Multiplexer, Runtime, Stream
from penstock.client.status import as_error, error_cause
from penstock.client.trace_context import TraceContext

_LEAVING_DEADLINE_S = 2.0
"""Longest wait for the Cancel call of a caller that leaves a stream early."""

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
UnaryMethod: TypeAlias = (
    "Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]]"
)
"""Returns a stub method for the channel of an attempt."""
StreamMethod: TypeAlias = (
    "Callable[[grpc.aio.Channel], grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]]"
)


class _Resumed:
    """Adapts a Resume call to the interface of the stream that it continues."""

    def __init__(
        self, call: "grpc.aio.UnaryStreamCall[pb.ResumeRequest, pb.ResumeResponse]"
    ) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        async for message in self._call:
            yield message.response

    def cancel(self) -> bool:
        return self._call.cancel()


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class Calls:
    """Makes calls, each with as many attempts as the settings allow."""

    def __init__(
        self,
        pool: Connections,
        *,
        runtime: Runtime,
        settings: CallSettings,
        multiplex: MultiplexConfig | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.pool = pool
        self._runtime = runtime
        self.settings = settings
        self.is_multiplexed = multiplex is not None
        self._multiplex = multiplex
        self._multiplexers: dict[int, Multiplexer] = {}
        self._lock = threading.Lock()
        self._sleep = sleep
        # Closing a grpc.aio channel leaves its open calls hanging, so the client cancels them.
        self._open_calls: set[_Cancellable] = set()

    def pairs(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Return the metadata of a generation. Raises ValueError for invalid metadata."""
        if self.is_multiplexed:
            require_no_metadata(metadata)
        return self.settings.call_metadata(metadata, trace)

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for open calls, cancel those that remain, close the channels."""
        await self.pool.drain(grace_s)
        self.pool.is_closed = True
        with self._lock:
            multiplexers = tuple(self._multiplexers.values())
            self._multiplexers.clear()
        for multiplexer in multiplexers:
            await multiplexer.close()
        for call in tuple(self._open_calls):
            call.cancel()
        await self.pool.close()

    def stream(
        self,
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: Pairs,
        *,
        is_whole: bool = False,
        canceller: Canceller | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Return the events of a generation.

        `is_whole`: no event is delivered before the last, so output does not prevent a retry.
        """
        recovery = self.settings.recovery(decode_seconds(request.resume_timeout))
        passage = Passage(request, attempts, recovery, is_whole=is_whole)
        return self._travel(passage, metadata, canceller)

    def resume(
        self, point: ResumePoint, attempts: Attempts, metadata: Pairs, *, grace_s: float
    ) -> AsyncGenerator[Event, None]:
        """Return the events of a request from `point` on."""
        passage = Passage(None, attempts, self.settings.recovery(grace_s), point=point)
        return self._travel(passage, metadata)

    def _travel(
        self, passage: Passage, metadata: Pairs, canceller: Canceller | None = None
    ) -> AsyncGenerator[Event, None]:
        events = self._read(passage, metadata, canceller)
        return self._cancelling(passage, events, metadata) if passage.can_live_on else events

    async def _cancelling(
        self, passage: Passage, events: AsyncGenerator[Event, None], metadata: Pairs
    ) -> AsyncGenerator[Event, None]:
        """Yield the events; cancel the request, which outlives its call, if the reader leaves."""
        is_left = True
        try:
            async for event in events:
                is_left = not isinstance(event, Finished)
                yield event
        except PenstockError as error:
            is_left = isinstance(error, CallCancelled)
            raise
        finally:
            await events.aclose()
            if is_left and passage.may_live_on:
                await self._cancel(passage.reader.request_id, metadata)

    async def _cancel(self, request_id: str, metadata: Pairs) -> None:
        """Cancel an abandoned request; if this fails, it ends with its grace period."""
        with suppress(PenstockError, RuntimeError):
            await self.unary(
                lambda channel: pb.GenerationServiceStub(channel).Cancel,
                pb.CancelRequest(request_id=request_id),
                self.settings.attempts(_LEAVING_DEADLINE_S),
                metadata,
            )

    async def _read(
        self, passage: Passage, metadata: Pairs, canceller: Canceller | None
    ) -> AsyncGenerator[Event, None]:
        async with self.pool.turn(passage.attempts.timeout_s()):
            while True:
                reader = passage.reader
                index, channel = self.pool.take()
                call: Stream | None = None
                is_unavailable = False
                try:
                    call = self._start(index, channel, passage, metadata)
                    self._follow(call, canceller)
                    async for response in call:
                        event = reader.receive(response)
                        if isinstance(event, Accepted):
                            self.pool.answered(index)
                        if event is not None:
                            yield event
                except (grpc.RpcError, PenstockError) as failed:
                    error = as_error(
                        failed, request_id=reader.request_id, is_asked=self._is_asked(canceller)
                    )
                    is_unavailable = self._is_unserved(index, error, reader.request_id)
                    delay_s = passage.delay_after(error)
                    if delay_s is None:
                        raise passage.explain(error) from error_cause(failed)
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
        *,
        request_id: str = "",
    ) -> ResponseT:
        """Make a unary call; return the response. `request_id`: its request, if any."""
        self.pool.require_open()
        while True:
            index, channel = self.pool.take()
            is_unavailable = False
            call = method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            self._open_calls.add(call)
            try:
                return await call
            except grpc.RpcError as failed:
                error = as_error(failed, is_asked=self.pool.is_closed)
                is_unavailable = self._is_unserved(index, error, error.request_id)
                delay_s = attempts.delay_after(error)
                if delay_s is None:
                    explained = attempts.explain(error)
                    if request_id and not explained.request_id:
                        explained = explained.of_request(request_id)
                    raise explained from failed
            except asyncio.CancelledError:
                self._explain_cancellation()
                raise
            finally:
                self._open_calls.discard(call)
                self.pool.release(index, is_unavailable=is_unavailable)
            await self._sleep(delay_s)

    async def one_stream(
        self,
        method: "StreamMethod[RequestT, ResponseT]",
        request: RequestT,
        attempts: Attempts,
        metadata: Pairs,
    ) -> AsyncGenerator[ResponseT, None]:
        """Yield the messages of a stream that is never retried."""
        async with self.borrowed_channel() as channel:
            call = method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            self._open_calls.add(call)
            try:
                async for response in call:
                    yield response
            except grpc.RpcError as failed:
                raise as_error(failed, is_asked=self.pool.is_closed) from failed
            except asyncio.CancelledError:
                self._explain_cancellation()
                raise
            finally:
                self._open_calls.discard(call)
                call.cancel()

    @asynccontextmanager
    async def borrowed_channel(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        """Provide a channel for a call without retries."""
        self.pool.require_open()
        index, channel = self.pool.take()
        try:
            yield channel
        finally:
            self.pool.release(index)

    def _is_unserved(self, index: int, error: PenstockError, request_id: str) -> bool:
        """Return whether an attempt shows that no server serves calls on its channel."""
        if is_silence(error, request_id):
            return self.pool.is_lost(index)
        return isinstance(error, Unavailable)

    def _start(
        self, index: int, channel: grpc.aio.Channel, passage: Passage, metadata: Pairs
    ) -> Stream:
        request, timeout_s = passage.next_request(), passage.attempts.timeout_s()
        stub = pb.GenerationServiceStub(channel)
        if isinstance(request, pb.ResumeRequest):
            return _Resumed(stub.Resume(request, timeout=timeout_s, metadata=metadata))
        if self._multiplex is None:
            return stub.Generate(request, timeout=timeout_s, metadata=metadata)
        multiplexer = self._multiplexer(index, channel, self._multiplex)
        return multiplexer.open(request, timeout_s, traceparent_of(metadata))

    def _multiplexer(
        self, index: int, channel: grpc.aio.Channel, config: MultiplexConfig
    ) -> Multiplexer:
        with self._lock:
            if self.pool.is_closed:
                raise client_closed()
            multiplexer = self._multiplexers.get(index)
            if multiplexer is None:
                multiplexer = self._multiplexers[index] = self._runtime.multiplexer(
                    channel, config, self.settings.shared_metadata(), self.settings.clock
                )
            return multiplexer

    def _follow(self, call: Stream, canceller: Canceller | None) -> None:
        """Track the call, so that closing the client or cancelling ends it."""
        self._open_calls.add(call)
        if canceller is not None:
            canceller.watch(call)

    def _is_asked(self, canceller: Canceller | None) -> bool:
        """Return whether this client cancelled the call itself."""
        return self.pool.is_closed or (canceller is not None and canceller.is_cancelled)

    def _explain_cancellation(self) -> None:
        """Raise the error of a closed client: gRPC raises CancelledError for a closed channel
        although the task was not cancelled.
        """
        task = asyncio.current_task()
        if self.pool.is_closed and not (task is not None and task.cancelling()):
            raise client_closed() from None
