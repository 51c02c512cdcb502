"""Serves grpc.health.v1 on the event loop, without blocking.

Stores one serving status for all services. The servicer of grpcio-health-checking holds a lock
while it writes to a watcher, and a change of status needs that lock, so one watcher that does not
read could block a drain. Here a change of status is an assignment and needs no lock.
"""

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
_NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
_UNKNOWN = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):
    """The serving status, common to all services. Watchers receive the current status and its
    changes; a slow watcher may miss a short-lived status.

    `max_stall_s` is how long a watcher may leave a status unread before its watch ends, in seconds.
    """

    def __init__(self, services: Iterable[str], *, max_stall_s: float) -> None:
        self._max_stall_s = max_stall_s
        self._services = frozenset(services) | {""}
        self._is_serving = False
        self._is_final = False
        self._is_closed = False
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True if SERVING is reported."""
        return self._is_serving

    def close(self) -> None:
        """Report NOT_SERVING and end all watches, because a server waits for its open calls when it
        stops."""
        self.shut_down()
        self._is_closed = True
        self._notify()

    def set_serving(self, is_serving: bool) -> None:
        """Change the status. Ignored after `shut_down`."""
        if self._is_final or is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        self._notify()

    def shut_down(self) -> None:
        """Report NOT_SERVING from now on."""
        self.set_serving(False)
        self._is_final = True

    async def Check(  # noqa: N802 - named by the protocol
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Return the current status. Aborts with NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._status(request.service)

    async def List(  # noqa: N802
        self, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        """Abort with UNIMPLEMENTED, because some releases of the generated code lack its
        messages."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check or Watch")

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """Send the current status (SERVICE_UNKNOWN for an unknown service) and its changes until
        the caller disconnects or the server stops."""
        sent: health_pb2.HealthCheckResponse | None = None
        while True:
            status = self._status(request.service)
            if status is not sent:
                await self._write(status, context)
                sent = status
                continue
            if self._is_closed:
                return
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)

    async def _write(self, status: health_pb2.HealthCheckResponse, context: _Context) -> None:
        try:
            async with asyncio.timeout(self._max_stall_s):
                await context.write(status)
        except TimeoutError:
            # A stream that is blocked by a message would also block the status.
            raise asyncio.CancelledError from None

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._is_serving else _NOT_SERVING
