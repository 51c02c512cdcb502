"""Makes the calls of a client: waits for admission, chooses a channel, retries, cancels.

Owns the connections and, for a client that multiplexes, the Multiplex calls on them. `client.py`,
`model_calls.py` and `operations.py` build the requests; `runtime.py` (event loop) and `blocking.py`
(threads) run them.
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
from penstock.client.local_errors import client_closed
from penstock.client.logical_stream import LogicalStream
from penstock.client.multiplex import MultiplexConfig
from penstock.client.pool import is_unanswered
from penstock.client.resuming import ResumePoint
from penstock.client.retry import Attempts
from penstock.client.runtime import Canceller, Multiplexer, Runtime, Stream
from penstock.client.status import as_error, error_cause
from penstock.client.trace_context import TraceContext

_CANCEL_DEADLINE_S = 2.0
"""Maximum time for the Cancel call when a caller leaves a stream early, in seconds."""

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
UnaryMethod: TypeAlias = (
    "Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]]"
)
"""Returns the stub method to call, for the channel that was chosen."""
StreamMethod: TypeAlias = (
    "Callable[[grpc.aio.Channel], grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]]"
)


class _ResumeStream:
    """Adapts a Resume call to `Stream`: yields the GenerateResponse in each of its messages."""

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
    """Makes calls, and retries them as the settings allow.

    Calls raise PenstockError when they fail, and RuntimeError if the client was already closed.
    """

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
        # Closing a grpc.aio channel does not end its open calls, so the client cancels them.
        self._open_calls: set[_Cancellable] = set()

    def generation_metadata(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Return the metadata of a generation. Raises TypeError for invalid `metadata`, and
        ValueError for an invalid token, or if the client multiplexes and `metadata` is given."""
        if self.is_multiplexed:
            require_no_metadata(metadata)
        return self.settings.call_metadata(metadata, trace)

    async def close(self, drain_timeout_s: float) -> None:
        """Accept no more calls, wait up to `drain_timeout_s` seconds for open generations, cancel
        all calls that are still open, and close the channels."""
        await self.pool.drain(drain_timeout_s)
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
        is_buffered: bool = False,
        canceller: Canceller | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Return the events of a generation.

        If `is_buffered`, the caller delivers the events only when all have arrived, so received
        output does not prevent a retry. `canceller` lets another thread end the stream.
        """
        recovery = self.settings.recovery(decode_seconds(request.resume_timeout))
        logical = LogicalStream(request, attempts, recovery, is_buffered=is_buffered)
        return self._stream_events(logical, metadata, canceller)

    def resume(
        self, point: ResumePoint, attempts: Attempts, metadata: Pairs, *, resume_timeout_s: float
    ) -> AsyncGenerator[Event, None]:
        """Return the events of a request from `point` on. After a lost connection, the stream is
        resumed for up to `resume_timeout_s` seconds."""
        logical = LogicalStream(
            None, attempts, self.settings.recovery(resume_timeout_s), point=point
        )
        return self._stream_events(logical, metadata)

    def _stream_events(
        self, logical: LogicalStream, metadata: Pairs, canceller: Canceller | None = None
    ) -> AsyncGenerator[Event, None]:
        events = self._read(logical, metadata, canceller)
        return self._cancelling(logical, events, metadata) if logical.can_outlive_call else events

    async def _cancelling(
        self, logical: LogicalStream, events: AsyncGenerator[Event, None], metadata: Pairs
    ) -> AsyncGenerator[Event, None]:
        """Yield the events. If the reader stops early, cancel the request, which would otherwise
        continue for its resume timeout."""
        is_abandoned = True
        try:
            async for event in events:
                is_abandoned = not isinstance(event, Finished)
                yield event
        except PenstockError as error:
            is_abandoned = isinstance(error, CallCancelled)
            raise
        finally:
            await events.aclose()
            if is_abandoned and logical.outlives_call:
                await self._cancel(logical.reader.request_id, metadata)

    async def _cancel(self, request_id: str, metadata: Pairs) -> None:
        """Cancel a request whose reader has stopped. A failure is ignored, because the request ends
        after its resume timeout."""
        with suppress(PenstockError, RuntimeError):
            await self.unary(
                lambda channel: pb.GenerationServiceStub(channel).Cancel,
                pb.CancelRequest(request_id=request_id),
                self.settings.attempts(_CANCEL_DEADLINE_S),
                metadata,
            )

    async def _read(
        self, logical: LogicalStream, metadata: Pairs, canceller: Canceller | None
    ) -> AsyncGenerator[Event, None]:
        async with self.pool.admitted(logical.attempts.timeout_s()):
            while True:
                reader = logical.reader
                index, channel = self.pool.acquire()
                call: Stream | None = None
                is_unavailable = False
                try:
                    call = self._start(index, channel, logical, metadata)
                    self._track(call, canceller)
                    async for response in call:
                        event = reader.receive(response)
                        if isinstance(event, Accepted):
                            self.pool.note_response(index)
                        if event is not None:
                            yield event
                except (grpc.RpcError, PenstockError) as failed:
                    error = as_error(
                        failed,
                        request_id=reader.request_id,
                        is_client_cancellation=self._has_cancelled(canceller),
                        address=self.pool.addresses,
                    )
                    is_unavailable = self._is_channel_unavailable(index, error, reader.request_id)
                    delay_s = logical.delay_after(error)
                    if delay_s is None:
                        raise logical.explain(error) from error_cause(failed)
                except asyncio.CancelledError:
                    self._raise_if_closed()
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
        """Make a unary call and return the response.

        `request_id` is added to an error that has no request id.
        """
        self.pool.require_open()
        while True:
            index, channel = self.pool.acquire()
            is_unavailable = False
            call = method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            self._open_calls.add(call)
            try:
                return await call
            except grpc.RpcError as failed:
                error = self._error_of(failed)
                is_unavailable = self._is_channel_unavailable(index, error, error.request_id)
                delay_s = attempts.delay_after(error)
                if delay_s is None:
                    explained = attempts.explain(error)
                    if request_id and not explained.request_id:
                        explained = explained.of_request(request_id)
                    raise explained from failed
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            finally:
                self._open_calls.discard(call)
                self.pool.release(index, is_unavailable=is_unavailable)
            await self._sleep(delay_s)

    async def stream_once(
        self,
        method: "StreamMethod[RequestT, ResponseT]",
        request: RequestT,
        attempts: Attempts,
        metadata: Pairs,
    ) -> AsyncGenerator[ResponseT, None]:
        """Make a server-streaming call without retries; yield its responses."""
        async with self.borrowed_channel() as channel:
            call = method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            self._open_calls.add(call)
            try:
                async for response in call:
                    yield response
            except grpc.RpcError as failed:
                raise self._error_of(failed) from failed
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            finally:
                self._open_calls.discard(call)
                call.cancel()

    @asynccontextmanager
    async def borrowed_channel(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        """Provide a channel, inside the `with` block, for a call without retries."""
        self.pool.require_open()
        index, channel = self.pool.acquire()
        try:
            yield channel
        finally:
            self.pool.release(index)

    def _error_of(self, failed: grpc.RpcError) -> PenstockError:
        """Return the typed error for a failed call. This client cancels such a call only when it is
        closed."""
        return as_error(
            failed, is_client_cancellation=self.pool.is_closed, address=self.pool.addresses
        )

    def _is_channel_unavailable(self, index: int, error: PenstockError, request_id: str) -> bool:
        """Return True if the error of an attempt shows that no server responds on its channel."""
        if is_unanswered(error, request_id):
            return self.pool.is_disconnected(index)
        return isinstance(error, Unavailable)

    def _start(
        self, index: int, channel: grpc.aio.Channel, logical: LogicalStream, metadata: Pairs
    ) -> Stream:
        request, timeout_s = logical.next_request(), logical.attempts.timeout_s()
        stub = pb.GenerationServiceStub(channel)
        if isinstance(request, pb.ResumeRequest):
            return _ResumeStream(stub.Resume(request, timeout=timeout_s, metadata=metadata))
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

    def _track(self, call: Stream, canceller: Canceller | None) -> None:
        """Track the call, so that closing the client or cancelling the request ends the call.
        Raises CallCancelled if the request was already cancelled."""
        self._open_calls.add(call)
        if canceller is not None:
            canceller.watch(call)

    def _has_cancelled(self, canceller: Canceller | None) -> bool:
        """Return True if this client has cancelled the call, by `close` or with `canceller`."""
        return self.pool.is_closed or (canceller is not None and canceller.is_cancelled)

    def _raise_if_closed(self) -> None:
        """Raise CallCancelled if a CancelledError was caused by closing the client: gRPC raises it
        when the channel is closed, although the task was not cancelled."""
        task = asyncio.current_task()
        if self.pool.is_closed and not (task is not None and task.cancelling()):
            raise client_closed() from None
