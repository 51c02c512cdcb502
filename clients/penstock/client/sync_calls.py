"""How the blocking client makes a call: its turn, its attempts, its channel, its end.

Owns one pool and, for a client that multiplexes, the Multiplex calls on it. Does not know what is
asked for: `sync_client.py` does.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
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
from penstock.client.decoding import decode_seconds
from penstock.client.errors import CallCancelled, PenstockError, Unavailable
from penstock.client.events import Accepted, Event, Finished
from penstock.client.multiplex import MultiplexConfig
from penstock.client.own_failures import client_closed, request_cancelled
from penstock.client.passage import Passage
from penstock.client.pool import is_silence
from penstock.client.resuming import ResumePoint
from penstock.client.retry import Attempts
from penstock.client.status import as_error, error_cause
from penstock.client.sync_multiplex import SyncMultiplexer
from penstock.client.sync_pool import SyncPool
from penstock.client.trace_context import TraceContext

_LEAVING_DEADLINE_S = 2.0
"""How long whoever leaves a stream early waits at most for its end to be taken."""

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
UnaryMethod: TypeAlias = (
    "Callable[[grpc.Channel], grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]]"
)
"""Finds a method on the channel that an attempt got."""


class _Stream(Protocol):
    """One attempt at a stream: a call of its own, or a request on a Multiplex call."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class _ResumeCall(Protocol):
    def __iter__(self) -> Iterator[pb.ResumeResponse]: ...

    def cancel(self) -> bool: ...


class _Resumed:
    """A Resume call as the stream that it goes on with."""

    def __init__(self, call: _ResumeCall) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        for message in self._call:
            yield message.response

    def cancel(self) -> bool:
        return self._call.cancel()


class Cancellation:
    """Ends a stream from another thread than the one that reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: _Stream | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the stream, now or as soon as it begins; its reader meets CallCancelled."""
        with self._lock:
            self.is_cancelled = True
            call = self._call
        if call is not None:
            call.cancel()

    def watch(self, call: _Stream) -> None:
        """`call` is the current attempt. Raises CallCancelled when that comes too late."""
        with self._lock:
            self._call = call
            is_cancelled = self.is_cancelled
        if is_cancelled:
            raise request_cancelled("")


class SyncCalls:
    """Makes calls, each with as many attempts as the settings allow."""

    def __init__(
        self,
        pool: SyncPool,
        *,
        settings: CallSettings,
        multiplex: MultiplexConfig | None,
        sleep: Callable[[float], None],
    ) -> None:
        self.pool = pool
        self.settings = settings
        self.is_multiplexed = multiplex is not None
        self._multiplex = multiplex
        self._multiplexers: dict[int, SyncMultiplexer] = {}
        self._lock = threading.Lock()
        self._sleep = sleep

    def pairs(self, metadata: Metadata, trace: TraceContext | None) -> Pairs:
        """Metadata of a generation. Raises ValueError for some that cannot be sent."""
        if self.is_multiplexed:
            require_no_metadata(metadata)
        return self.settings.call_metadata(metadata, trace)

    def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for open calls, cancel what is left, hang up."""
        self.pool.drain(grace_s)
        self.pool.is_closed = True
        with self._lock:
            multiplexers = tuple(self._multiplexers.values())
            self._multiplexers.clear()
        for multiplexer in multiplexers:
            multiplexer.close()
        self.pool.close()

    def stream(
        self,
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: Pairs,
        *,
        is_whole: bool = False,
        cancellation: Cancellation | None = None,
    ) -> Generator[Event, None, None]:
        """The events of a generation.

        `is_whole`: nobody sees them before the last, so output does not stand against a retry.
        """
        recovery = self.settings.recovery(decode_seconds(request.resume_grace_period))
        passage = Passage(request, attempts, recovery, is_whole=is_whole)
        return self._travel(passage, metadata, cancellation or Cancellation())

    def resume(
        self, point: ResumePoint, attempts: Attempts, metadata: Pairs, *, grace_s: float
    ) -> Generator[Event, None, None]:
        """The events of a request from a point on."""
        passage = Passage(None, attempts, self.settings.recovery(grace_s), point=point)
        return self._travel(passage, metadata, Cancellation())

    def _travel(
        self, passage: Passage, metadata: Pairs, cancellation: Cancellation
    ) -> Generator[Event, None, None]:
        events = self._read(passage, metadata, cancellation)
        return self._cancelling(passage, events, metadata) if passage.can_live_on else events

    def _cancelling(
        self, passage: Passage, events: Generator[Event, None, None], metadata: Pairs
    ) -> Generator[Event, None, None]:
        """`events` of a request that does not end with its call: whoever leaves cancels it."""
        is_left = True
        try:
            for event in events:
                is_left = not isinstance(event, Finished)
                yield event
        except PenstockError as error:
            is_left = isinstance(error, CallCancelled)
            raise
        finally:
            events.close()
            if is_left and passage.may_live_on:
                self._cancel(passage.reader.request_id, metadata)

    def _cancel(self, request_id: str, metadata: Pairs) -> None:
        """End a request that nobody reads; what fails here ends with its grace."""
        with suppress(PenstockError, RuntimeError):
            self.unary(
                lambda channel: pb.GenerationServiceStub(channel).Cancel,
                pb.CancelRequest(request_id=request_id),
                self.settings.attempts(_LEAVING_DEADLINE_S),
                metadata,
            )

    def _read(
        self, passage: Passage, metadata: Pairs, cancellation: Cancellation
    ) -> Generator[Event, None, None]:
        def asked() -> bool:
            return cancellation.is_cancelled or self.pool.is_closed

        with self.pool.turn(passage.attempts.timeout_s()):
            while True:
                reader = passage.reader
                index, channel = self.pool.take()
                call: _Stream | None = None
                is_unavailable = False
                try:
                    call = self._start(index, channel, passage, metadata)
                    cancellation.watch(call)
                    for response in call:
                        event = reader.receive(response)
                        if isinstance(event, Accepted):
                            self.pool.answered(index)
                        if event is not None:
                            yield event
                except (grpc.RpcError, PenstockError) as failed:
                    error = as_error(failed, request_id=reader.request_id, is_asked=asked())
                    is_unavailable = self._is_unserved(index, error, reader.request_id)
                    delay_s = passage.delay_after(error)
                    if delay_s is None:
                        raise passage.explain(error) from error_cause(failed)
                else:
                    yield reader.end()
                    return
                finally:
                    if call is not None:
                        call.cancel()
                    self.pool.release(index, is_unavailable=is_unavailable)
                self._sleep(delay_s)

    def unary(
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
            try:
                return method(channel)(request, timeout=attempts.timeout_s(), metadata=metadata)
            except grpc.RpcError as failed:
                error = as_error(failed, is_asked=self.pool.is_closed)
                is_unavailable = self._is_unserved(index, error, error.request_id)
                delay_s = attempts.delay_after(error)
                if delay_s is None:
                    raise error from failed
            finally:
                self.pool.release(index, is_unavailable=is_unavailable)
            self._sleep(delay_s)

    @contextmanager
    def borrowed_channel(self) -> Generator[grpc.Channel, None, None]:
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
        self, index: int, channel: grpc.Channel, passage: Passage, metadata: Pairs
    ) -> _Stream:
        request, timeout_s = passage.next_request(), passage.attempts.timeout_s()
        stub = pb.GenerationServiceStub(channel)
        if isinstance(request, pb.ResumeRequest):
            return _Resumed(stub.Resume(request, timeout=timeout_s, metadata=metadata))
        if self._multiplex is None:
            return stub.Generate(request, timeout=timeout_s, metadata=metadata)
        multiplexer = self._multiplexer(index, channel, self._multiplex)
        return multiplexer.open(request, timeout_s, traceparent_of(metadata))

    def _multiplexer(
        self, index: int, channel: grpc.Channel, config: MultiplexConfig
    ) -> SyncMultiplexer:
        with self._lock:
            if self.pool.is_closed:
                raise client_closed()
            multiplexer = self._multiplexers.get(index)
            if multiplexer is None:
                multiplexer = SyncMultiplexer(
                    channel,
                    config=config,
                    metadata=self.settings.shared_metadata(),
                    clock=self.settings.clock,
                )
                self._multiplexers[index] = multiplexer
            return multiplexer
