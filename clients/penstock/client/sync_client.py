"""The blocking client of a Penstock server: `client.Client` without asyncio.

It uses gRPC's blocking API and has no event loop. It starts threads only for a batch or a Multiplex
call. It shares its implementation with `client.Client`; `blocking.py` runs this implementation
without an event loop.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Unpack

import grpc

from penstock.client.batch import (
    DEFAULT_MAX_CONCURRENCY,
    BatchItem,
    BatchRequest,
    OnEvent,
)
from penstock.client.blocking import (
    THREADS,
    BlockingAdapter,
    blocking_generator,
    blocking_method,
    blocking_sleep,
)
from penstock.client.call_settings import CallSettings, Metadata
from penstock.client.channel import DEFAULT_ADDRESS, ChannelConfig
from penstock.client.client import Client
from penstock.client.credentials import TlsConfig, Token
from penstock.client.errors import PenstockError
from penstock.client.events import Generation
from penstock.client.multiplex import MultiplexConfig
from penstock.client.options import GenerationOptions
from penstock.client.pool import PoolConfig, PoolState
from penstock.client.retry import RetryPolicy
from penstock.client.without_loop import iterate, run


class _ThreadClient(Client):
    """The asynchronous client, run with blocking calls instead of an event loop."""

    _runtime = THREADS


class SyncClient(BlockingAdapter[Client]):
    """The blocking client of a server, for any number of threads: `Client` without async and await.

    It has the methods of `Client`, with iterators instead of asynchronous iterators, and raises the
    same exceptions. Leaving an iterator early cancels the request; with `contextlib.closing` it is
    cancelled immediately. A program that continues after Ctrl-C should use `Client`: a
    KeyboardInterrupt may leave a lock of gRPC's blocking stream held, and later calls hang.
    """

    def __init__(  # noqa: PLR0913 - each is one choice of the caller
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        token: Token | None = None,
        tls: bool | TlsConfig = False,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
        pool: PoolConfig | None = None,
        multiplex: bool | MultiplexConfig = False,
        resume_timeout_s: float | None = None,
        settings: CallSettings | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a client. The arguments are the same as for `Client`, but `sleep` blocks."""
        super().__init__(
            _ThreadClient(
                address,
                token=token,
                tls=tls,
                credentials=credentials,
                metadata=metadata,
                retry=retry,
                channel=channel,
                pool=pool,
                multiplex=multiplex,
                resume_timeout_s=resume_timeout_s,
                settings=settings,
                sleep=blocking_sleep(sleep),
            )
        )

    @property
    def pool_state(self) -> PoolState:
        """The current numbers of connections and generations."""
        return self._asynchronous.pool_state

    close = blocking_method(Client.close)
    generate = blocking_generator(Client.generate)
    resume = blocking_generator(Client.resume)
    chat = blocking_generator(Client.chat)
    chat_once = blocking_method(Client.chat_once)
    generate_text = blocking_generator(Client.generate_text)
    generate_once = blocking_method(Client.generate_once)
    cancel = blocking_method(Client.cancel)
    list_models = blocking_method(Client.list_models)
    get_model = blocking_method(Client.get_model)
    tokenize = blocking_method(Client.tokenize)
    detokenize = blocking_method(Client.detokenize)
    health = blocking_method(Client.health)
    wait_until_serving = blocking_method(Client.wait_until_serving)

    # Not shared with `Client`, because these requests come only from a plain iterable.
    def generate_many(
        self,
        requests: Iterable[BatchRequest],
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> Generator[BatchItem, None, None]:
        """Same as `Client.generate_many`, for a plain iterable; each open request has a thread."""
        items = self._asynchronous.generate_many(
            requests,
            max_concurrency=max_concurrency,
            deadline_s=deadline_s,
            metadata=metadata,
            **options,
        )
        return iterate(items)

    def generate_all(
        self,
        requests: Iterable[BatchRequest],
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        on_event: OnEvent | None = None,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> list[Generation | PenstockError]:
        """Same as `Client.generate_all`, for a plain iterable."""
        results = self._asynchronous.generate_all(
            requests,
            max_concurrency=max_concurrency,
            on_event=on_event,
            deadline_s=deadline_s,
            metadata=metadata,
            **options,
        )
        return run(results)
