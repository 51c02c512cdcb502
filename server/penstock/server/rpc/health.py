"""grpc.health.v1, told from the event loop without waiting for anybody.

Owns the serving status by service name and those who watch it. The servicer that comes with
grpcio-health-checking writes to a watcher while it holds the lock that a change of status needs, so
one watcher that does not read could hold up a drain; here a change is a plain assignment.
"""

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
_NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
_UNKNOWN = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):
    """All services serve, or none does. `set_serving` is seen by every watcher.

    `max_stall_s`: how long a watcher may leave a status unread; then its watch ends.
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
        """What is told now."""
        return self._is_serving

    def close(self) -> None:
        """End all watches: a server that stops waits for open calls."""
        self.shut_down()
        self._is_closed = True
        self._tell()

    def set_serving(self, is_serving: bool) -> None:
        """Tell another status; without effect after `shut_down`."""
        if self._is_final or is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        self._tell()

    def shut_down(self) -> None:
        """NOT_SERVING from now on."""
        self.set_serving(False)
        self._is_final = True

    async def Check(  # noqa: N802 - named by the protocol
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not ours."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._status(request.service)

    async def List(  # noqa: N802
        self, request: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        """Not offered: not every release of the generated code knows its messages."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check or Watch")

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """The status now and after every change, until the caller leaves or the server stops."""
        told: health_pb2.HealthCheckResponse | None = None
        while True:
            status = self._status(request.service)
            if status is not told:
                await self._write(status, context)
                told = status
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
            # Nobody takes a status of the call from a stream that takes no message.
            raise asyncio.CancelledError from None

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            return _UNKNOWN
        return _SERVING if self._is_serving else _NOT_SERVING
