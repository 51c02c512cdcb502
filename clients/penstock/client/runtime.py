"""Defines what the shared client implementation requires of a runtime, and the asyncio runtime.

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
        """Set the event, to wake the side that waits."""
        ...

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until the event is set, at most `timeout_s` seconds; None for no limit."""
        ...


class Stream(Protocol):
    """One attempt at a stream: a separate call, or a request on a Multiplex call."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    def cancel(self) -> bool:
        """Cancel the attempt. Returns True if it was still open."""
        ...


class Canceller(Protocol):
    """Lets another thread end a stream that is being read."""

    @property
    def is_cancelled(self) -> bool:
        """True if the stream was cancelled, even if it had not begun."""
        ...

    def watch(self, call: Stream) -> None:
        """Set the call that a cancellation ends from now on.

        Raises CallCancelled if the stream was already cancelled.
        """
        ...


class Multiplexer(Protocol):
    """The Multiplex calls of one channel."""

    def open(
        self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> Stream:
        """Start a request. Raises DeadlineExceeded if no time is left, and other PenstockErrors if
        it cannot be sent."""
        ...

    async def close(self) -> None:
        """Cancel the calls. Readers of open requests get CallCancelled."""
        ...


class StartStream(Protocol):
    """Starts one request of a batch."""

    def __call__(
        self, index: int, request: BatchRequest, canceller: Canceller | None = None
    ) -> AsyncGenerator[Event, None]:
        """Return the events of the request with this index in the batch. `canceller` lets another
        thread end the stream.

        Raises ValueError or TypeError, naming the index, if the request is invalid.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The functions in which the asyncio client and the threaded client differ.

    `channel` opens a channel, in plain text if there are no credentials. `signal` creates a
    one-time event. `multiplexer` creates the Multiplex calls of a channel. `read_batch` sends the
    requests of a batch, of which a limited number is open at a time, and yields their items as they
    arrive; closing the generator cancels the open requests.
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
            return  # The caller checks the outcome.


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
