"""Serves OperationsService with a gRPC server on a separate port, for operators.

Owns the server, reports its health, and sets its limits. The handlers are in `operations_methods`.
"""

import asyncio
import contextlib
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from penstock.server.front.config import FrontConfig
from penstock.server.observe.operations.service import Operations
from penstock.server.rpc import reflection, service_names
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.rpc.health import Health
from penstock.server.rpc.operations_methods import OperationsMethods
from penstock.server.rpc.options import KeepaliveConfig, add_port, server_options
from penstock.server.rpc.read_limiter import RequestReadLimiter
from penstock.server.security.security import Security

MAX_CALLS = 256
"""Maximum number of calls of authorised callers handled at a time. Health checks, which need no
right, have a separate limit of the same size. Further calls get RESOURCE_EXHAUSTED. gRPC's own
limit would also count unauthenticated calls."""
_LIMITS = FrontConfig()
"""The operations server has the default limits of a front (gRPC server process)."""
_FLUSH_S = 0.5


class OperationsServer:
    """Serves `Operations` on `host` and `port` (0: any free port). Call all methods on one running
    event loop.

    `is_port_reserved` is True if this service already holds the port with a SO_REUSEPORT socket
    that does not listen. If `security` is None, connections are plain text and all callers are
    authorised.
    """

    def __init__(
        self,
        operations: Operations,
        host: str,
        port: int,
        *,
        is_port_reserved: bool = False,
        security: Security | None = None,
    ) -> None:
        # IPv6 addresses need brackets.
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._is_port_reserved = is_port_reserved
        self._health = Health((service_names.OPERATIONS,), max_stall_s=_LIMITS.max_reader_stall_s)
        self._stopping = asyncio.Event()
        self._tls = None if security is None else security.tls
        self._access = AccessControl(security)
        self._methods = OperationsMethods(operations, self._stopping)
        self._wrapper = HandlerWrapper(
            retry_after_s=_LIMITS.retry_after_s, on_internal_error=self._count_internal_error
        )
        self.num_internal_errors = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Start the server and return the bound port. Raises OSError if the address cannot be
        bound."""
        # One process serves operators, so the port must not be shared with another program.
        options = dict(server_options(KeepaliveConfig()))
        options["grpc.so_reuseport"] = int(self._is_port_reserved)
        server = grpc.aio.server(options=tuple(options.items()))
        limiter = RequestReadLimiter(
            server,
            self._access,
            max_arrival_s=_LIMITS.transport.max_arrival_s,
            max_stall_s=_LIMITS.max_reader_stall_s,
            max_calls=MAX_CALLS,
        )
        limiter.add_generic_rpc_handlers((self._methods.handlers(self._wrapper),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, cast(Any, limiter))
        reflection.add_reflection(limiter, (service_names.OPERATIONS, service_names.HEALTH))
        try:
            port = add_port(server, self._address, self._tls)
        except RuntimeError as error:
            await server.stop(None)
            raise OSError(f"cannot listen on {self._address}") from error
        await server.start()
        self._server = server
        self._health.set_serving(True)
        return port

    async def stop(self) -> None:
        """End WatchStats calls and health watches, and stop the server, within about a second.
        Idempotent."""
        self._stopping.set()
        self._health.shut_down()
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._wrapper.wait_until_idle()
        self._health.close()
        await server.stop(_FLUSH_S)

    def _count_internal_error(self) -> None:
        self.num_internal_errors += 1
