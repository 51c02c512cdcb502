"""The blocking client of a server's OperationsService: `operations.py` without asyncio.

Contains the public class. The implementation is shared, and `blocking.py` runs it.
"""

import time
from collections.abc import Callable

import grpc

from penstock.client.blocking import (
    THREADS,
    BlockingAdapter,
    blocking_generator,
    blocking_method,
    blocking_sleep,
)
from penstock.client.call_settings import Metadata
from penstock.client.channel import DEFAULT_OPERATIONS_ADDRESS, ChannelConfig
from penstock.client.credentials import TlsConfig, Token
from penstock.client.operations import OperationsClient
from penstock.client.retry import RetryPolicy


class _ThreadOperationsClient(OperationsClient):
    """The asynchronous client, run with blocking calls instead of an event loop."""

    _runtime = THREADS


class SyncOperationsClient(BlockingAdapter[OperationsClient]):
    """The blocking client of a server's operations port, for any number of threads.

    It has the methods of `OperationsClient` and raises the same exceptions.
    """

    def __init__(
        self,
        address: str = DEFAULT_OPERATIONS_ADDRESS,
        *,
        token: Token | None = None,
        tls: bool | TlsConfig = False,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a client. The arguments are the same as for `OperationsClient`, but `sleep`
        blocks.
        """
        super().__init__(
            _ThreadOperationsClient(
                address,
                token=token,
                tls=tls,
                credentials=credentials,
                metadata=metadata,
                retry=retry,
                channel=channel,
                sleep=blocking_sleep(sleep),
            )
        )

    close = blocking_method(OperationsClient.close)
    get_stats = blocking_method(OperationsClient.get_stats)
    watch_stats = blocking_generator(OperationsClient.watch_stats)
    list_requests = blocking_method(OperationsClient.list_requests)
    get_request = blocking_method(OperationsClient.get_request)
    drain = blocking_method(OperationsClient.drain)
    get_flight_steps = blocking_method(OperationsClient.get_flight_steps)
    get_flight_record = blocking_method(OperationsClient.get_flight_record)
    dump_flight_record = blocking_method(OperationsClient.dump_flight_record)
    set_log_level = blocking_method(OperationsClient.set_log_level)
    profile = blocking_method(OperationsClient.profile)
