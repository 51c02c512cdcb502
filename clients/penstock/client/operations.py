"""The asyncio client of a server's OperationsService: statistics, live requests and commands.

Contains the public class. `calls.py` makes the calls, `operations_values.py` has the results.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import ClassVar, Self

import grpc

import penstock.v1 as pb
from penstock.client.call_settings import (
    CONTROL_DEADLINE_S,
    MAX_NUM_PAGES,
    CallSettings,
    Metadata,
    metadata_pairs,
)
from penstock.client.calls import Calls, RequestT, ResponseT, StreamMethod, UnaryMethod
from penstock.client.channel import (
    DEFAULT_OPERATIONS_ADDRESS,
    DEFAULT_OPERATIONS_PORT,
    ChannelConfig,
    grpc_target,
)
from penstock.client.connections import Connections
from penstock.client.credentials import TlsConfig, Token, channel_credentials, check_token
from penstock.client.encoding import filled
from penstock.client.errors import StreamBroken
from penstock.client.events import RequestState
from penstock.client.operations_decoding import decode_live_request, decode_stats, decode_step
from penstock.client.operations_encoding import (
    FILE_DEADLINE_S,
    drain_request,
    flight_request,
    list_request,
    log_level_request,
    profile_request,
    watch_request,
)
from penstock.client.operations_values import (
    FlightFormat,
    LiveRequest,
    LogLevel,
    ServerProcess,
    ServerStats,
    StepRecord,
)
from penstock.client.pool import PoolConfig
from penstock.client.retry import RetryPolicy
from penstock.client.runtime import ASYNCIO, Runtime
from penstock.conventions import DEFAULT_PROFILE_S, MAX_PAGE_SIZE


class OperationsClient:
    """The asyncio client of a server's operations port. Use it in one event loop.

    All calls raise `PenstockError` when they fail, ValueError or TypeError for invalid arguments,
    and RuntimeError on a closed client. `deadline_s` is the number of seconds that a call may take.
    Calls with one response are retried according to `RetryPolicy`; streams and files are not
    retried.
    """

    _runtime: ClassVar[Runtime] = ASYNCIO

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a client. It connects at its first call: with `tls` or `credentials` if given,
        otherwise in plain text.

        `address` is HOST, HOST:PORT (default 50052) or another gRPC target. `metadata` is gRPC
        metadata of all calls. For `token`, `tls` and the exceptions see `Client`.
        """
        credentials = channel_credentials(tls, credentials)
        targets = (grpc_target(address, DEFAULT_OPERATIONS_PORT),)
        check_token(token, targets, is_encrypted=credentials is not None)
        settings = CallSettings(
            retry=retry or RetryPolicy(), metadata=metadata_pairs(metadata), token=token
        )
        pool = Connections(
            self._runtime,
            targets,
            config=PoolConfig(),
            channel=channel or ChannelConfig(),
            credentials=credentials,
            clock=settings.clock,
        )
        self._calls = Calls(
            pool, runtime=self._runtime, settings=settings, multiplex=None, sleep=sleep
        )

    def __repr__(self) -> str:
        return f"OperationsClient({self._calls.pool.addresses!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel open calls and disconnect. May be called twice."""
        await self._calls.close(0.0)

    async def get_stats(
        self, model: str | None = None, *, deadline_s: float | None = CONTROL_DEADLINE_S
    ) -> ServerStats:
        """Return a snapshot of the server; if `model` is set, with only that model."""
        response = await self._call_method(
            lambda channel: pb.OperationsServiceStub(channel).GetStats,
            filled(pb.GetStatsRequest(), model=model),
            deadline_s,
        )
        return decode_stats(response.stats)

    async def watch_stats(
        self,
        model: str | None = None,
        *,
        interval_s: float | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[ServerStats, None]:
        """Stream a snapshot every `interval_s` seconds (None: 1 s), the first one immediately."""
        responses = self._stream(
            lambda channel: pb.OperationsServiceStub(channel).WatchStats,
            watch_request(model, interval_s),
            deadline_s,
        )
        async with aclosing(responses):
            async for response in responses:
                yield decode_stats(response.stats)

    async def list_requests(
        self,
        *,
        model: str | None = None,
        tenant: str | None = None,
        state: RequestState | None = None,
        max_requests: int | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> tuple[LiveRequest, ...]:
        """Return live requests in order of arrival, at most the oldest `max_requests`.

        The list is read in pages; a request that ends while they are read may be missing.
        `deadline_s` applies to each page.
        """
        request = list_request(model, tenant, state, max_requests)
        found: list[LiveRequest] = []
        for _ in range(MAX_NUM_PAGES):
            page = await self._call_method(
                lambda channel: pb.OperationsServiceStub(channel).ListLiveRequests,
                request,
                deadline_s,
            )
            found.extend(decode_live_request(each) for each in page.requests)
            num_left = None if max_requests is None else max_requests - len(found)
            if not page.next_page_token or num_left == 0:
                return tuple(found)
            request.page_token = page.next_page_token
            request.page_size = MAX_PAGE_SIZE if num_left is None else min(num_left, MAX_PAGE_SIZE)
        raise StreamBroken.with_message(
            f"the list of requests did not end after {MAX_NUM_PAGES} pages"
        )

    async def get_request(
        self,
        request_id: str,
        *,
        tenant: str | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> LiveRequest:
        """Return one live request. Raises `RequestNotFound`.

        `tenant` is needed only if two tenants use the same id.
        """
        response = await self._call_method(
            lambda channel: pb.OperationsServiceStub(channel).GetLiveRequest,
            filled(pb.GetLiveRequestRequest(), request_id=request_id, tenant=tenant),
            deadline_s,
        )
        return decode_live_request(response.request)

    async def drain(
        self,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> int:
        """Reject new requests, and stop the server when its live requests have ended.

        Returns immediately, with the number of live requests. A drain cannot be cancelled.
        `timeout_s` is how long live requests may continue, in seconds; None for the server's
        setting.
        """
        response = await self._call_method(
            lambda channel: pb.OperationsServiceStub(channel).Drain,
            drain_request(timeout_s),
            deadline_s,
        )
        return response.num_live_requests

    async def get_flight_steps(
        self,
        model: str | None = None,
        *,
        max_steps: int | None = None,
        deadline_s: float | None = FILE_DEADLINE_S,
    ) -> tuple[StepRecord, ...]:
        """Return the engine's last `max_steps` recorded steps, or all recorded steps if `max_steps`
        is None, the oldest first."""
        request = flight_request(model, max_steps, None)
        pieces = self._flight_record(request, deadline_s)
        async with aclosing(pieces):
            return tuple(
                [decode_step(step) async for piece in pieces for step in piece.steps.steps]
            )

    async def get_flight_record(
        self,
        model: str | None = None,
        *,
        file_format: FlightFormat = FlightFormat.RAW,
        max_steps: int | None = None,
        deadline_s: float | None = FILE_DEADLINE_S,
    ) -> bytes:
        """Return the flight record, a log of the engine's last steps, as a file.

        `max_steps` limits it to the latest steps; it is not allowed with RAW.
        """
        request = flight_request(model, max_steps, file_format)
        pieces = self._flight_record(request, deadline_s)
        async with aclosing(pieces):
            return b"".join([piece.file_chunk async for piece in pieces])

    async def dump_flight_record(
        self, model: str | None = None, *, deadline_s: float | None = CONTROL_DEADLINE_S
    ) -> str:
        """Write the flight record to a file on the server's machine and return its path there."""
        response = await self._call_method(
            lambda channel: pb.OperationsServiceStub(channel).DumpFlightRecord,
            filled(pb.DumpFlightRecordRequest(), model=model),
            deadline_s,
        )
        return response.path

    async def set_log_level(
        self, level: LogLevel, *, deadline_s: float | None = CONTROL_DEADLINE_S
    ) -> None:
        """Set the lowest severity that all processes of the server log."""
        await self._call_method(
            lambda channel: pb.OperationsServiceStub(channel).SetLogLevel,
            log_level_request(level),
            deadline_s,
        )

    async def profile(
        self,
        process: ServerProcess = ServerProcess.ENGINE,
        *,
        front_index: int | None = None,
        duration_s: float = DEFAULT_PROFILE_S,
        deadline_s: float | None = None,
    ) -> bytes:
        """Sample the call stacks of a process for `duration_s` seconds, and return the profile as a
        file for www.speedscope.app.

        `front_index` is the `FrontStats.index` of the process, and is only for FRONT. If
        `deadline_s` is None, it is `duration_s` plus 60 s.
        """
        pieces = self._stream(
            lambda channel: pb.OperationsServiceStub(channel).Profile,
            profile_request(process, front_index, duration_s),
            duration_s + FILE_DEADLINE_S if deadline_s is None else deadline_s,
        )
        async with aclosing(pieces):
            return b"".join([piece.file_chunk async for piece in pieces])

    def _flight_record(
        self, request: pb.GetFlightRecordRequest, deadline_s: float | None
    ) -> AsyncGenerator[pb.GetFlightRecordResponse, None]:
        return self._stream(
            lambda channel: pb.OperationsServiceStub(channel).GetFlightRecord, request, deadline_s
        )

    async def _call_method(
        self,
        method: "UnaryMethod[RequestT, ResponseT]",
        request: RequestT,
        deadline_s: float | None,
    ) -> ResponseT:
        settings = self._calls.settings
        pairs = settings.call_metadata((), None)
        return await self._calls.unary(method, request, settings.attempts(deadline_s), pairs)

    def _stream(
        self,
        method: "StreamMethod[RequestT, ResponseT]",
        request: RequestT,
        deadline_s: float | None,
    ) -> AsyncGenerator[ResponseT, None]:
        settings = self._calls.settings
        attempts = settings.attempts(deadline_s)
        return self._calls.stream_once(method, request, attempts, settings.call_metadata((), None))
