"""How the blocking client makes a call: its turn, its attempts, its channel, its end.

Owns one pool and, for a client that multiplexes, the Multiplex calls on it. Does not know what is
asked for: `sync_client.py` does.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
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
from penstock.client.errors import PenstockError, Unavailable
from penstock.client.events import Accepted, Event
from penstock.client.multiplex import MultiplexConfig
from penstock.client.own_failures import client_closed, request_cancelled
from penstock.client.pool import is_silence
from penstock.client.retry import Attempts
from penstock.client.status import as_error, error_cause
from penstock.client.stream_reader import StreamReader
from penstock.client.sync_multiplex import SyncMultiplexer
from penstock.client.sync_pool import SyncPool
from penstock.client.trace_context import TraceContext

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
        cancellation = cancellation or Cancellation()

        def asked() -> bool:
            return cancellation.is_cancelled or self.pool.is_closed

        with self.pool.turn(attempts.timeout_s()):
            while True:
                reader = StreamReader()
                index, channel = self.pool.take()
                call: _Stream | None = None
                is_unavailable = False
                try:
                    call = self._start(index, channel, request, attempts.timeout_s(), metadata)
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
                    has_output = reader.has_output and not is_whole
                    delay_s = attempts.delay_after(error, has_output=has_output)
                    if delay_s is None:
                        raise error from error_cause(failed)
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
        self,
        index: int,
        channel: grpc.Channel,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        metadata: Pairs,
    ) -> _Stream:
        if self._multiplex is None:
            stub = pb.GenerationServiceStub(channel)
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
                    metadata=self.settings.metadata,
                    clock=self.settings.clock,
                )
                self._multiplexers[index] = multiplexer
            return multiplexer
