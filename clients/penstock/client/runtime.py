"""What the one implementation of the client stands on: channels, waiting, and shared streams.

Owns the seam between the asyncio face and the blocking one, and its asyncio side. `blocking.py` is
the other side: there nothing that is awaited ever suspends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Protocol, TypeAlias

import grpc

import penstock.v1 as pb
from penstock.client.async_batch import read_batch
from penstock.client.async_multiplex import AsyncMultiplexer
from penstock.client.batch import BatchItem, BatchRequest
from penstock.client.call_settings import Pairs
from penstock.client.events import Event
from penstock.client.multiplex import MultiplexConfig

ChannelOptions: TypeAlias = tuple[tuple[str, int | str], ...]


class News(Protocol):
    """Something that one side waits for and the other tells, once."""

    def tell(self) -> None:
        """It has happened."""
        ...

    async def wait(self, timeout_s: float | None) -> None:
        """Return when it has, or after `timeout_s`."""
        ...


class Stream(Protocol):
    """One attempt at a stream: a call of its own, or a request on a Multiplex call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    def cancel(self) -> bool:
        """Give it up; whether it was still open."""
        ...


class Canceller(Protocol):
    """Ends a stream from another thread than the one that reads it."""

    @property
    def is_cancelled(self) -> bool:
        """Whether it did."""
        ...

    def watch(self, call: Stream) -> None:
        """`call` is the current attempt. Raises CallCancelled when that comes too late."""
        ...


class Multiplexer(Protocol):
    """The Multiplex calls of one channel."""

    def open(
        self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> Stream:
        """Start a request. Raises DeadlineExceeded when no time is left."""
        ...

    async def close(self) -> None:
        """Cancel the calls; open requests raise CallCancelled."""
        ...


class StartStream(Protocol):
    """Starts one request of a batch."""

    def __call__(
        self, request: BatchRequest, canceller: Canceller | None = None
    ) -> AsyncGenerator[Event, None]:
        """Its events."""
        ...


class Runtime(Protocol):
    """What differs between an event loop and threads."""

    def channel(
        self, target: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
    ) -> grpc.aio.Channel:
        """Open a channel; without `credentials` in plain text."""
        ...

    def news(self) -> News:
        """Something to wait for."""
        ...

    def multiplexer(
        self,
        channel: grpc.aio.Channel,
        *,
        config: MultiplexConfig,
        metadata: Pairs,
        clock: Callable[[], float],
    ) -> Multiplexer:
        """The Multiplex calls of a channel of this runtime."""
        ...

    def read_batch(
        self,
        requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
        start: StartStream,
        width: int,
    ) -> AsyncGenerator[BatchItem, None]:
        """The items of all requests as they come; leaving early cancels what is open."""
        ...


class _LoopNews:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return  # whoever waits looks for what has happened


class AsyncioRuntime:
    """The running event loop, and grpc.aio on it."""

    def channel(
        self, target: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
    ) -> grpc.aio.Channel:
        """See `Runtime`."""
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    def news(self) -> News:
        """See `Runtime`."""
        return _LoopNews()

    def multiplexer(
        self,
        channel: grpc.aio.Channel,
        *,
        config: MultiplexConfig,
        metadata: Pairs,
        clock: Callable[[], float],
    ) -> Multiplexer:
        """See `Runtime`."""
        return AsyncMultiplexer(channel, config=config, metadata=metadata, clock=clock)

    def read_batch(
        self,
        requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
        start: StartStream,
        width: int,
    ) -> AsyncGenerator[BatchItem, None]:
        """See `Runtime`."""
        return read_batch(requests, start, width)
