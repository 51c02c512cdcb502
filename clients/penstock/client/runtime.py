"""Primitives of the shared client implementation: channels, waiting, and shared streams.

Owns the interface between the shared implementation and its two runtimes, and the asyncio runtime.
`blocking.py` has the thread runtime, in which an await never suspends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
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


class Signal(Protocol):
    """A one-time event: one side waits for it, the other sets it."""

    def set(self) -> None:
        """Set the event."""
        ...

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until it is set, at most `timeout_s`."""
        ...


class Stream(Protocol):
    """One attempt at a stream: a separate call, or a request on a Multiplex call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    def cancel(self) -> bool:
        """Cancel; return whether it was still open."""
        ...


class Canceller(Protocol):
    """Ends a stream from a thread other than the one that reads it."""

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        ...

    def watch(self, call: Stream) -> None:
        """Set the current attempt. Raises CallCancelled if it was already cancelled."""
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
        """Return the events of the request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The differences between an event loop and threads.

    `channel`: opens a channel; without credentials in plain text. `read_batch`: yields the items of
    all requests as they arrive, a number of requests at a time; leaving early cancels open
    requests.
    """

    channel: Callable[
        [str, ChannelOptions, grpc.ChannelCredentials | None],
        grpc.aio.Channel,
    ]
    signal: Callable[[], Signal]
    multiplexer: Callable[
        [grpc.aio.Channel, MultiplexConfig, Pairs, Callable[[], float]],
        Multiplexer,
    ]
    read_batch: Callable[
        [Iterable[BatchRequest] | AsyncIterable[BatchRequest], StartStream, int],
        AsyncGenerator[BatchItem, None],
    ]


class _LoopSignal:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return  # the caller checks the outcome


def _loop_channel(
    target: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


ASYNCIO = Runtime(
    channel=_loop_channel, signal=_LoopSignal, multiplexer=AsyncMultiplexer, read_batch=read_batch
)
"""The runtime for the running event loop, with grpc.aio."""
