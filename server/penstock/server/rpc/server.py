"""Runs the gRPC server of a front (gRPC server process), from its start to its drain.

Owns the grpc.aio server with all services on one port, reports health, and defines the order of
shutdown. Passes the engine's events to `Front`. Does not start processes, and installs no signal
handlers.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc

from penstock.scheduler.events import StepEvents
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Failure
from penstock.server.front.front import Front
from penstock.server.front.spare_memory import SpareMemory, resident_bytes, trim
from penstock.server.ipc.frames import EngineHello
from penstock.server.ipc.ports import EnginePort
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.rpc import reflection, service_names
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.gateway_service import GatewayServiceMaker
from penstock.server.rpc.generation_service import GenerationService
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.rpc.health import Health
from penstock.server.rpc.large_messages import LargeMessageQueue
from penstock.server.rpc.model_service import ModelService
from penstock.server.rpc.options import KeepaliveConfig, ServerOptions, add_port, server_options
from penstock.server.rpc.read_limiter import RequestReadLimiter
from penstock.server.security.security import Security
from penstock.server.text.model_text import ModelText

logger = logging.getLogger(__name__)
_OWN_SERVICES = (service_names.GENERATION, service_names.MODEL)
_DRAINING = Failure(reason=ErrorReason.DRAINING)
_FINAL_EVENTS_S = 1.0
"""How long streams that a drain has ended may take to send their status, in seconds."""
_FLUSH_S = 0.5
"""How long written data may take to be sent, in seconds. Only a hanging call takes all of it."""
_QUIET_S = 0.2
_MAX_LINGER_S = 2.0
"""A drain rejects calls until none has arrived for `_QUIET_S`, but for at most `_MAX_LINGER_S`."""
_MAX_SWEEP_INTERVAL_S = 1.0


class FrontServer:
    """A front with its gRPC server. It implements `EnginePortListener`. Call all methods on one
    running event loop.

    Usually the engine port (`port`, the connection to the engine) is created first, then this
    server, and then the port is started with the server as its listener. See `Front` for `recorder`
    and `is_tracing`; when `drain` or `stop` returns, `recorder` has received all records.
    `has_operations` is True if the service has an OperationsService, on a separate port. If
    `security` is None, connections are plain text and all clients are authorised. `gateway` creates
    the gRPC service of a gateway for the same front; None for no gateway.
    """

    def __init__(  # noqa: PLR0913 (everything that a composition root may set)
        self,
        text: ModelText,
        config: FrontConfig,
        *,
        port: EnginePort | None = None,
        keepalive: KeepaliveConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        extra_options: ServerOptions = (),
        has_operations: bool = False,
        random: Callable[[], float] = random.random,
        recorder: RequestRecorder | None = None,
        is_tracing: bool = False,
        security: Security | None = None,
        gateway: GatewayServiceMaker | None = None,
    ) -> None:
        self.front = Front(
            text, config, port=port, clock=clock, recorder=recorder, is_tracing=is_tracing
        )
        self._keepalive = keepalive or KeepaliveConfig()
        self._tls = None if security is None else security.tls
        self._access = AccessControl(security, tenant_metadata_key=config.tenant_metadata_key)
        self._gateway = None if gateway is None else gateway(self.front, self._access)
        self._services: tuple[str, ...] = _OWN_SERVICES
        if self._gateway is not None:
            self._services += (self._gateway.name,)
            self._access.add_rights(self._gateway.rights)
        self.health = Health(self._services, max_stall_s=config.max_reader_stall_s)
        self._models = ModelService(self.front, self._keepalive, has_operations=has_operations)
        own_options = server_options(self._keepalive, config.transport)
        # If two options have the same name, the core uses the first one.
        self._options = tuple(dict((*own_options, *extra_options)).items())
        self._wrapper = HandlerWrapper(
            retry_after_s=config.retry_after_s,
            on_internal_error=self._count_internal_error,
            random=random,
        )
        self._large_messages = LargeMessageQueue()
        self._generation = GenerationService(self.front, self._access, self._large_messages)
        self.on_engine_change: Callable[[], object] = lambda: None
        """Called when an engine has connected or was lost."""
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._rejecting: asyncio.Task[None] | None = None

    @property
    def num_live_requests(self) -> int:
        """Number of requests that the front has not removed yet."""
        return len(self.front.table)

    @property
    def num_active_calls(self) -> int:
        """Number of open calls, without calls of health, reflection and channelz."""
        return self._wrapper.num_active_calls

    async def start(self, address: str) -> int:
        """Listen on `address` ("127.0.0.1:50051"; port 0 for any free port) and return the bound
        port.

        Raises OSError if the address cannot be bound. Serves immediately; health reports
        NOT_SERVING until an engine has connected.
        """
        server = grpc.aio.server(options=self._options)
        config = self.front.config
        limiter = RequestReadLimiter(
            server,
            self._access,
            max_arrival_s=config.transport.max_arrival_s,
            max_stall_s=config.max_reader_stall_s,
            large_messages=self._large_messages,
        )
        limiter.add_generic_rpc_handlers(
            (
                self._generation.handlers(self._wrapper),
                self._models.handlers(self._wrapper),
            )
        )
        if self._gateway is not None:
            limiter.add_generic_rpc_handlers((self._gateway.handlers(self._wrapper),))
        # The annotation requires a concrete server, but a wrapper of one is accepted.
        health_pb2_grpc.add_HealthServicer_to_server(self.health, cast(Any, limiter))
        # Untyped upstream.
        add_channelz = cast(Any, channelz_pb2_grpc.add_ChannelzServicer_to_server)  # pyright: ignore[reportUnknownMemberType]
        add_channelz(channelz.aio.ChannelzServicer(), limiter)
        reflection.add_reflection(
            limiter, (*self._services, service_names.HEALTH, service_names.CHANNELZ)
        )
        try:
            bound_port = add_port(server, address, self._tls)
        except RuntimeError as error:
            await server.stop(None)
            raise OSError(f"cannot listen on {address}") from error
        await server.start()
        self._server = server
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return bound_port

    def on_hello(self, hello: EngineHello) -> None:
        """Handle a new connection to an engine: pass its `hello` to the front, and report
        SERVING."""
        self.front.on_hello(hello)
        self.health.set_serving(True)
        self.on_engine_change()

    def on_events(self, events: StepEvents) -> None:
        """Pass the events of one engine step to the requests."""
        self.front.on_events(events)

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Remove a request that another front has taken over, or that the engine has dropped."""
        self.front.on_detached(name, keys)

    def on_lost(self) -> None:
        """Handle the loss of the connection to the engine: report NOT_SERVING, and notify the
        front."""
        self.health.set_serving(False)
        self.front.on_lost()
        self.on_engine_change()

    async def drain(self, drain_timeout_s: float, *, has_successor: bool = False) -> None:
        """Accept no new requests, let live requests finish for `drain_timeout_s` seconds, then
        stop.

        Requests that are live after the drain timeout end with UNAVAILABLE, but the engine keeps
        resumable ones, for other fronts. During the drain, health checks are answered and new calls
        are rejected. With `has_successor` this lasts only until no new call arrives for a moment;
        then the server stops listening, because callers can reach another server on this port.
        """
        self.front.begin_drain()
        self.health.shut_down()
        if has_successor:
            self._rejecting = asyncio.create_task(self._reject_new(drain_timeout_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout_s):
                await self._wrapper.wait_until_idle()
        if self.num_live_requests:
            num_unread = self.front.num_detached
            if num_unread:
                logger.info(
                    "drain: %d requests without a reader are left for other fronts", num_unread
                )
            if self.num_live_requests > num_unread:
                num_late = self.num_live_requests - num_unread
                logger.warning("drain: %d requests did not finish in time", num_late)
            await self._fail_all()
        if not has_successor:
            await self._wait_until_quiet()
        await self.stop()

    async def stop(self) -> None:
        """Stop without a drain. Live requests end as in `drain`. Idempotent."""
        self.front.begin_drain()
        self.health.shut_down()
        await self._fail_all()
        self.health.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._rejecting is not None:
            self._rejecting.cancel()
            await asyncio.gather(self._rejecting, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            # Not zero, which would drop statuses that are being sent.
            await server.stop(_FLUSH_S)
        self.front.accounts.flush()

    async def _reject_new(self, drain_timeout_s: float) -> None:
        """Reject new calls, then stop listening, so that clients that reconnect reach the server
        that has taken over."""
        await self._wait_until_quiet()
        self.health.close()
        if self._server is not None:
            await self._server.stop(drain_timeout_s + _FINAL_EVENTS_S)

    async def _fail_all(self) -> None:
        self.front.detach_resumable(_DRAINING)
        self.front.fail_all(_DRAINING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_EVENTS_S):
                await self._wrapper.wait_until_idle()

    async def _wait_until_quiet(self) -> None:
        """Wait until no calls arrive for `_QUIET_S`, at most `_MAX_LINGER_S`; the handlers reject
        calls meanwhile.

        When the gRPC core shuts down, it cancels all calls that no handler has received. Their
        clients get CANCELLED, and must not retry a call with this status.
        """
        for _ in range(round(_MAX_LINGER_S / _QUIET_S)):
            num_calls = self._wrapper.num_calls
            await asyncio.sleep(_QUIET_S)
            if self._wrapper.num_calls == num_calls:
                return

    async def _sweep(self) -> None:
        interval_s = min(self.front.config.max_reader_stall_s / 4, _MAX_SWEEP_INTERVAL_S)
        memory = SpareMemory(resident_bytes, time.monotonic)
        while True:
            await asyncio.sleep(interval_s)
            self.front.disconnect_stalled()
            if memory.is_worth_trimming():
                await asyncio.to_thread(trim)
                memory.note_trimmed()
            self.front.accounts.sweep(self.front.clock())

    def _count_internal_error(self) -> None:
        self.front.counters.num_internal_errors += 1
