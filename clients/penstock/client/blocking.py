"""Runs the asynchronous implementation without an event loop: every await blocks the thread.

Contains the thread runtime, which implements the interface of grpc.aio with gRPC's blocking API,
and the base class that turns an asynchronous class into a blocking one. A coroutine on this runtime
never suspends, so its first step runs it to the end, on the calling thread.
"""

import inspect
import queue
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from functools import partial, update_wrapper
from types import GenericAlias
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, get_args

import grpc

from penstock.client.batch import BatchItem, BatchRequest
from penstock.client.call_settings import Pairs
from penstock.client.multiplex import MultiplexConfig
from penstock.client.runtime import ChannelOptions, Runtime, StartStream
from penstock.client.sync_batch import read_batch
from penstock.client.sync_multiplex import SyncMultiplexer
from penstock.client.without_loop import iterate, run

_STATE_TIMEOUT_S = 1.0


class _Client(Protocol):
    async def close(self) -> None: ...


AsyncT = TypeVar("AsyncT", bound=_Client)
AsyncT_co = TypeVar("AsyncT_co", bound=_Client, covariant=True)
ResultT = TypeVar("ResultT")
ParamsT = ParamSpec("ParamsT")


class BlockingAdapter(Generic[AsyncT_co]):
    """Base class of the blocking clients: runs methods of an asynchronous object on the calling
    thread."""

    def __init__(self, asynchronous: AsyncT_co) -> None:
        self._asynchronous = asynchronous

    def __repr__(self) -> str:
        return f"Sync{self._asynchronous!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run(self._asynchronous.close())


def _async_client(blocking_client: BlockingAdapter[AsyncT]) -> AsyncT:
    return blocking_client._asynchronous  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def blocking_method(
    method: Callable[Concatenate[AsyncT, ParamsT], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[BlockingAdapter[AsyncT], ParamsT], ResultT]:
    """Return a blocking method that runs a coroutine method to its end and returns its result."""

    def call(
        blocking_client: BlockingAdapter[AsyncT], /, *args: ParamsT.args, **options: ParamsT.kwargs
    ) -> ResultT:
        return run(method(_async_client(blocking_client), *args, **options))

    _copy_signature(call, method, inspect.signature(method))
    return call


def blocking_generator(
    method: Callable[Concatenate[AsyncT, ParamsT], AsyncGenerator[ResultT, None]],
) -> Callable[Concatenate[BlockingAdapter[AsyncT], ParamsT], Generator[ResultT, None, None]]:
    """Return the blocking form of an asynchronous generator method: a generator that blocks until
    the next item."""

    def call(
        blocking_client: BlockingAdapter[AsyncT], /, *args: ParamsT.args, **options: ParamsT.kwargs
    ) -> Generator[ResultT, None, None]:
        return iterate(method(_async_client(blocking_client), *args, **options))

    signature = inspect.signature(method)
    item, _ = get_args(signature.return_annotation)
    returns = GenericAlias(Generator, (item, None, None))
    _copy_signature(call, method, signature.replace(return_annotation=returns))
    return call


def _copy_signature(call: Any, method: Callable[..., object], signature: inspect.Signature) -> None:
    update_wrapper(call, method)
    del call.__wrapped__
    call.__annotations__ = {**call.__annotations__, "return": signature.return_annotation}
    call.__signature__ = signature


def blocking_sleep(sleep: Callable[[float], None]) -> Callable[[float], Awaitable[None]]:
    """Return an awaitable form of `sleep`. Awaiting it blocks the thread."""

    async def awaited(delay_s: float) -> None:
        sleep(delay_s)

    return awaited


class _ThreadSignal:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None) -> None:
        self._event.wait(timeout_s)


class _Channel:
    """The part of grpc.aio.Channel that the client uses, over a blocking channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def unary_unary(self, *args: Any, **options: Any) -> "Callable[..., _UnaryCall]":
        method: Callable[..., Any] = self.channel.unary_unary(*args, **options)
        return partial(_UnaryCall, method)

    def unary_stream(self, *args: Any, **options: Any) -> "Callable[..., _StreamCall]":
        method: Callable[..., Any] = self.channel.unary_stream(*args, **options)
        return partial(_StreamCall, method)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self.channel.stream_stream(*args, **options)

    def get_state(self) -> grpc.ChannelConnectivity | None:
        """Return the state of the connection; None if gRPC does not report it within
        `_STATE_TIMEOUT_S` seconds.

        gRPC reports the state only to subscribers, beginning with the current state.
        """
        states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
        self.channel.subscribe(states.put)
        try:
            return states.get(timeout=_STATE_TIMEOUT_S)
        except queue.Empty:
            return None
        finally:
            self.channel.unsubscribe(states.put)

    async def close(self) -> None:
        """Close the channel and cancel its open calls."""
        self.channel.close()


class _UnaryCall:
    """A call with one response. Awaiting it sends the request and blocks the thread."""

    def __init__(self, method: Callable[..., Any], request: Any, **options: Any) -> None:
        self._invoke = partial(method, request, **options)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._invoke()

    def cancel(self) -> bool:
        """Do nothing and return False: gRPC's blocking call has no handle to cancel. Closing the
        channel ends the call."""
        return False


class _StreamCall:
    """A call with a stream of responses. Its iteration blocks until the next response."""

    def __init__(self, method: Callable[..., Any], request: Any, **options: Any) -> None:
        self._call = method(request, **options)
        self._responses: Iterator[Any] = iter(self._call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._responses)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> bool:
        return bool(self._call.cancel())


def _thread_channel(
    target: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    return cast("grpc.aio.Channel", _Channel(channel))


def _thread_multiplexer(
    channel: grpc.aio.Channel, config: MultiplexConfig, metadata: Pairs, clock: Callable[[], float]
) -> SyncMultiplexer:
    return SyncMultiplexer(cast("_Channel", channel).channel, config, metadata, clock)


def _read_batch(
    requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest], start: StartStream, width: int
) -> AsyncGenerator[BatchItem, None]:
    if not isinstance(requests, Iterable):
        raise TypeError("requests: must be a plain iterable for the blocking client")
    return read_batch(requests, start, width)


THREADS = Runtime(
    channel=_thread_channel,
    signal=_ThreadSignal,
    multiplexer=_thread_multiplexer,
    read_batch=_read_batch,
)
"""The runtime for threads, with gRPC's blocking API."""
